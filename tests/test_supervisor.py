"""Child processes: started again with back-off, explained, and ended with the manager."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from parrot.config import EngineConfig
from parrot.manager import supervisor
from parrot.manager.background import Background
from parrot.manager.supervisor import Supervisor, engine_argv

CONFIG = EngineConfig(manager_address="", model="tiny", num_blocks=64)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        await asyncio.sleep(0.01)


def run_script(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Engines are this Python script."""
    monkeypatch.setattr(supervisor, "engine_argv", lambda _: [sys.executable, "-c", script])


def supervise(
    on_exit: Callable[[int], bool] = lambda _: False,
    is_hung: Callable[[int], bool] = lambda _: False,
    on_hopeless: Callable[[str], None] = lambda _: None,
    has_joined: Callable[[int], bool] = lambda _: False,
    engines: Sequence[EngineConfig] = (CONFIG,),
) -> Supervisor:
    return Supervisor(
        engines,
        "tcp://127.0.0.1:1",
        on_exit=on_exit,
        is_hung=is_hung,
        on_hopeless=on_hopeless,
        has_joined=has_joined,
        background=Background(),
    )


def test_the_command_line_carries_every_option_that_is_set() -> None:
    argv = engine_argv(EngineConfig("tcp://127.0.0.1:1", name="engine-3", num_threads=2, parent_pid=7))
    assert argv[:4] == [sys.executable, "-m", "parrot.cli.main", "engine"]
    options = dict(zip(argv[4::2], argv[5::2], strict=True))
    assert options["--manager"] == "tcp://127.0.0.1:1"
    assert (options["--name"], options["--num-threads"]) == ("engine-3", "2")
    assert "--num-blocks" not in options
    assert options["--parent-pid"] == "7"


def test_an_exception_over_an_ended_engine_does_not_keep_it_from_being_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_script(monkeypatch, "import sys; sys.exit(3)")
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.01,))
    ended: list[int] = []

    def fail(pid: int) -> bool:
        ended.append(pid)
        raise RuntimeError("a bug in the manager")

    async def scenario() -> None:
        children = supervise(fail)
        children.start()
        await until(lambda: len(ended) >= 3)
        await children.close()

    asyncio.run(scenario())


def test_an_engine_that_dies_at_start_is_tried_again_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(monkeypatch, "import sys; print('no such device', file=sys.stderr); sys.exit(3)")
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.01,))
    ended: list[int] = []

    def never_joined(pid: int) -> bool:
        ended.append(pid)
        return False

    async def scenario() -> None:
        children = supervise(never_joined)
        children.start()
        await until(lambda: len(ended) >= 3)
        assert children.problem is not None
        assert re.search(r"[2-9] times in a row", children.problem)
        assert "exit code 3" in children.problem
        assert "no such device" in children.problem
        await children.close()

    asyncio.run(scenario())
    assert len(set(ended)) == len(ended)


@pytest.mark.parametrize("stubborn", [False, True])
def test_closing_ends_every_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stubborn: bool) -> None:
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" if stubborn else ""
    marker = tmp_path / "up"
    run_script(
        monkeypatch, f"{ignore}import time, pathlib; pathlib.Path({str(marker)!r}).touch(); time.sleep(600)"
    )
    monkeypatch.setattr(supervisor, "_TERMINATE_S", 0.3 if stubborn else 60.0)

    async def scenario() -> None:
        children = supervise()
        children.start()
        await until(marker.exists)
        process = children._children[0].process
        assert process is not None
        await children.close()
        assert process.returncode == (-9 if stubborn else -15)

    asyncio.run(scenario())


def test_a_very_long_line_of_an_engine_does_not_stop_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(
        monkeypatch, "import sys; sys.stderr.write('x' * 10**6 + chr(10) + 'end' + chr(10)); sys.exit(1)"
    )
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.01,))

    async def scenario() -> None:
        children = supervise()
        children.start()
        await until(lambda: children.problem is not None)
        assert "end" in str(children.problem)
        await children.close()

    asyncio.run(scenario())


def test_an_engine_that_fails_to_start_again_is_reported_as_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(monkeypatch, "import sys; print('no such device', file=sys.stderr); sys.exit(2)")
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.01,))
    reasons: list[str] = []

    async def scenario() -> None:
        children = supervise(on_hopeless=reasons.append)
        children.start()
        await until(lambda: len(reasons) >= 2)
        await children.close()

    asyncio.run(scenario())
    assert "ended 2 times in a row" in reasons[0]
    assert "no such device" in reasons[0]


def test_an_engine_that_had_joined_is_no_failed_start_however_short_it_lived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_script(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.01,))
    ended: list[int] = []
    reasons: list[str] = []

    def joined(pid: int) -> bool:
        ended.append(pid)
        return True

    async def scenario() -> None:
        children = supervise(joined, on_hopeless=reasons.append)
        children.start()
        await until(lambda: len(ended) >= 4)
        assert children.problem is None
        await children.close()

    asyncio.run(scenario())
    assert not reasons


def test_a_hung_engine_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.01,))
    monkeypatch.setattr(supervisor, "_HUNG_CHECK_S", 0.02)
    hung: set[int] = set()
    ended: list[int] = []

    def joined(pid: int) -> bool:
        ended.append(pid)
        return True

    async def scenario() -> None:
        children = supervise(joined, is_hung=hung.__contains__)
        children.start()
        await until(lambda: children._children[0].process is not None)
        process = children._children[0].process
        assert process is not None
        hung.add(process.pid)
        await until(lambda: ended == [process.pid])
        assert process.returncode == -9
        await until(lambda: children._children[0].process is not None)
        await children.close()

    asyncio.run(scenario())


def started(children: Supervisor) -> list[bool]:
    """Which engines have a process."""
    return [child.process is not None for child in children._children]


def test_engines_on_the_cpu_start_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(monkeypatch, "import time; time.sleep(600)")
    joined: set[int] = set()

    async def scenario() -> None:
        children = supervise(has_joined=joined.__contains__, engines=[CONFIG] * 3)
        children.start()
        for count in (1, 2):
            await until(lambda count=count: sum(started(children)) == count)  # type: ignore[misc]
            await asyncio.sleep(5 * supervisor._TURN_CHECK_S)
            assert started(children) == [True] * count + [False] * (3 - count)
            process = children._children[count - 1].process
            assert process is not None
            joined.add(process.pid)
        await until(lambda: all(started(children)))
        await children.close(0.0)

    asyncio.run(scenario())


@pytest.mark.parametrize("trouble", ["it ends", "it hangs"])
def test_an_engine_that_does_not_come_up_does_not_keep_the_next_from_starting(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys; sys.exit(2)" if trouble == "it ends" else "import time; time.sleep(600)"
    run_script(monkeypatch, script)
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.01,))
    if trouble == "it hangs":
        monkeypatch.setattr(supervisor, "_TURN_S", 0.1)
    lives: list[int] = []

    async def scenario() -> None:
        children = supervise(lambda pid: bool(lives.append(pid)), engines=[CONFIG, CONFIG])
        children.start()
        if trouble == "it ends":
            await until(lambda: all(child.num_failed_starts >= 2 for child in children._children))
        else:
            await until(lambda: all(started(children)))
            assert not lives
        await children.close(0.0)

    asyncio.run(scenario())


def test_engines_that_measure_nothing_or_on_a_gpu_of_their_own_start_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_script(monkeypatch, "import time; time.sleep(600)")

    async def scenario(config: EngineConfig) -> None:
        children = supervise(engines=[config] * 2)
        children.start()
        await until(lambda: all(started(children)))
        await children.close(0.0)

    asyncio.run(scenario(replace(CONFIG, device="cuda:0")))
    asyncio.run(scenario(replace(CONFIG, simulate=tmp_path)))
