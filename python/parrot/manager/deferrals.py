"""What events have still to do, since their transforms would hold the loop, goes on beside all else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import InternalError
from .background import Background
from .fair_lock import FairLock
from .flow import Changes, Later
from .transform_worker import TransformWorker
from .transforms import Failure, Work

_LOST = "the service failed while it passed values on; its log has the trace"


class Deferrals:
    """One task for each event that is not done. ``apply`` carries out what it changes; ``turn`` follows.

    They share the worker fairly: however much one tenant or session gives it to do, others wait for one
    chain of each."""

    def __init__(
        self, background: Background, *, apply: Callable[[Changes], None], turn: Callable[[], None]
    ) -> None:
        self.worker = TransformWorker()
        self._lock = FairLock()  # of the worker
        self._background = background
        self._apply = apply
        self._turn = turn
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_pending(self) -> int:
        """Events that have something to do."""
        return len(self._tasks)

    def start(self, later: Later) -> None:
        """Do what is left of an event."""
        task = asyncio.create_task(self._run(later))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self, timeout_s: float) -> None:
        """Until all that is pending now is done, or for so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def close(self) -> None:
        """Once every session has ended."""
        self.worker.close()

    async def _run(self, later: Later) -> None:
        with self._background.guarded("transforms"):
            following: Later | None = later
            while following is not None and not following.is_over:
                following = await self._step(following)

    async def _step(self, later: Later) -> Later | None:
        changes = Changes()
        try:
            work = later.work
            done = await self._do(work, later)
            if later.is_over:
                return None
            changes = later.go_on(work, done)
            following, changes.later = changes.later, None
            self._carry_out(changes)
        except Exception:
            # Nobody else would end what is left, which includes calls that were to be queued.
            self._carry_out(later.fail(changes.ready, InternalError(_LOST).to_info()))
            raise
        return following

    async def _do(self, work: Work | None, later: Later) -> tuple[str | Failure, float] | None:
        """What came of the work; None if there is none, or nobody needs it any more."""
        if work is None:
            await asyncio.sleep(0)
            return None
        async with self._lock.held(later.tenant, later.session_id):
            return None if later.is_over else await self.worker.run(work)

    def _carry_out(self, changes: Changes) -> None:
        self._apply(changes)
        with self._background.guarded("transforms"):  # there will be other turns
            self._turn()
