"""Engine processes that the manager starts itself: restarted with back-off when they die, ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from ..config import EngineConfig
from .background import Background

log = logging.getLogger(__name__)
_QUICK_DEATH_S = 10.0
_BACKOFF_S = (0.2, 1.0, 3.0, 10.0, 30.0)
_TERMINATE_S = 3.0
_MAX_LINE_BYTES = 64 * 1024
_NUM_LAST_LINES = 12
_HOPELESS_STARTS = 2
_HUNG_CHECK_S = 1.0
_TURN_CHECK_S = 0.05
_TURN_S = 60.0  # for an engine to join, before the next one starts beside it


def engine_argv(config: EngineConfig) -> list[str]:
    """The command line of one engine."""
    options: list[tuple[str, object]] = [
        ("--manager", config.manager_address),
        ("--name", config.name),
        ("--model", config.model),
        ("--device", config.device),
        ("--dtype", config.dtype),
        ("--backend", config.backend),
        ("--num-blocks", config.num_blocks),
        ("--max-batch-size", config.max_batch_size),
        ("--max-batch-tokens", config.max_batch_tokens),
        ("--num-threads", config.num_threads),
        ("--parent-pid", config.parent_pid),
        ("--drain-grace-s", config.drain_grace_s),
        ("--stall-after-s", config.stall_after_s),
        ("--simulate", config.simulate),
        ("--curve-keys", config.curve_keys),
    ]
    argv = [sys.executable, "-m", "parrot.cli.main", "engine"]
    for flag, value in options:
        if value is not None:
            argv += [flag, str(value)]
    if not config.shared_prefix_attention:
        argv.append("--no-shared-prefix-attention")
    if not config.overlap:
        argv.append("--no-overlap")
    if not config.cuda_graphs:
        argv.append("--no-cuda-graphs")
    if config.dummy_weights:
        argv.append("--dummy-weights")
    return argv


@dataclass(slots=True)
class _Child:
    config: EngineConfig
    process: asyncio.subprocess.Process | None = None
    num_failures: int = 0  # lives in a row that never joined, or were short
    num_failed_starts: int = 0  # lives in a row that never joined
    last_exit: str = ""
    last_words: deque[str] = field(default_factory=deque)  # of the life that ended last
    started_s: float = 0.0  # when the process was
    follows: _Child | None = None  # to whose first life it leaves the processor, before its own


class Supervisor:
    """Keeps one process per engine configuration alive.

    ``on_exit`` is told the id of a process that ended, and says whether that engine had ever joined;
    ``is_hung`` says of a process that it will not answer again, so that it is killed and replaced;
    ``has_joined`` whether that of a process has joined: engines on the CPU, which measure themselves at their
    start, first start one after the other, each when the one before has joined, ended, or taken too long;
    ``on_hopeless`` is told why, whenever a start fails and all engines have failed to start repeatedly.
    """

    def __init__(
        self,
        engines: Sequence[EngineConfig],
        manager_address: str,
        *,
        on_exit: Callable[[int], bool],
        is_hung: Callable[[int], bool],
        has_joined: Callable[[int], bool],
        on_hopeless: Callable[[str], None],
        background: Background,
    ) -> None:
        self._background = background
        self._on_exit = on_exit
        self._is_hung = is_hung
        self._has_joined = has_joined
        self._on_hopeless = on_hopeless
        self._children = [
            _Child(replace(config, manager_address=manager_address, parent_pid=os.getpid()))
            for config in engines
        ]
        for before, child in pairwise(self._children):
            if child.config.device == "cpu" and child.config.simulate is None:
                child.follows = before
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to start the engines; returns at once."""
        self._tasks = [
            self._background.start("supervisor", partial(self._live_once, child)) for child in self._children
        ]

    async def close(self, grace_s: float | None = None) -> None:
        """End all engines: SIGTERM, and after ``grace_s`` (3 s unless given) SIGKILL for those that stay."""
        processes = [child.process for child in self._children if child.process is not None]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        grace_s = _TERMINATE_S if grace_s is None else grace_s
        await asyncio.gather(*(_reap(process, grace_s) for process in processes))

    @property
    def problem(self) -> str | None:
        """Why an engine does not come up, with the end of what it printed; None while nothing is known."""
        for child in self._children:
            if child.num_failed_starts:
                times = (
                    "once" if child.num_failed_starts == 1 else f"{child.num_failed_starts} times in a row"
                )
                return (
                    f"{child.config.name} does not come up, it ended {times} "
                    f"({child.last_exit}): {' | '.join(child.last_words)}"
                )
        return None

    @property
    def num_children(self) -> int:
        """How many engines this manager starts itself."""
        return len(self._children)

    async def _live_once(self, child: _Child) -> None:
        """One life of a process, and the pause after it."""
        while child.follows is not None and not self._is_settled(child.follows):
            await asyncio.sleep(_TURN_CHECK_S)
        child.follows = None
        started = time.monotonic()
        has_joined = await self._run_once(child)
        lived_s = time.monotonic() - started
        is_failure = not has_joined or lived_s < _QUICK_DEATH_S
        child.num_failures = child.num_failures + 1 if is_failure else 0
        child.num_failed_starts = 0 if has_joined else child.num_failed_starts + 1
        with self._background.guarded("supervisor"):
            self._report_hopeless()
        pause_s = _BACKOFF_S[min(child.num_failures, len(_BACKOFF_S) - 1)]
        log.warning(
            "%s ended (%s) after %.1f s; starting it again in %.1f s",
            child.config.name,
            child.last_exit,
            lived_s,
            pause_s,
        )
        await asyncio.sleep(pause_s)

    def _is_settled(self, child: _Child) -> bool:
        """Whether its first start is over, or has taken so long that it may as well have company."""
        if child.process is None:
            return bool(child.last_exit)
        took_s = time.monotonic() - child.started_s
        return took_s > _TURN_S or self._has_joined(child.process.pid)

    def _report_hopeless(self) -> None:
        problem = self.problem
        if problem and all(child.num_failed_starts >= _HOPELESS_STARTS for child in self._children):
            self._on_hopeless(problem)

    async def _kill_when_hung(self, process: asyncio.subprocess.Process) -> None:
        await asyncio.sleep(_HUNG_CHECK_S)
        if self._is_hung(process.pid):
            log.warning("process %d does not answer any more; it is killed and replaced", process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _run_once(self, child: _Child) -> bool:
        """One life of a process; whether it joined."""
        try:
            process = await asyncio.create_subprocess_exec(
                *engine_argv(child.config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                limit=_MAX_LINE_BYTES,
            )
        except OSError as error:
            child.last_exit = f"cannot start: {error}"
            return False
        child.process, child.started_s = process, time.monotonic()
        log.info("%s started as process %d", child.config.name, process.pid)
        assert process.stderr is not None
        last_words: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        watch = self._background.start("hung-engine", partial(self._kill_when_hung, process))
        try:
            await _pass_on(process.stderr, last_words)
            code = await process.wait()
        finally:
            watch.cancel()
        child.process = None
        child.last_exit = f"signal {-code}" if code < 0 else f"exit code {code}"
        child.last_words = last_words
        with self._background.guarded("supervisor"):
            return self._on_exit(process.pid)


async def _pass_on(stream: asyncio.StreamReader, tail: deque[str]) -> None:
    """Copy an engine's standard error to ours, and keep its last lines."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # a line longer than the limit: its beginning is dropped
            continue
        if not line:
            return
        text = line.decode("utf-8", "replace")
        with contextlib.suppress(OSError, ValueError):  # nobody reads ours: no reason to leave the engine
            sys.stderr.write(text)
        if text.strip():
            tail.append(text.strip()[:500])


async def _reap(process: asyncio.subprocess.Process, grace_s: float) -> None:
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
