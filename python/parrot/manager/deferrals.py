"""What events have still to do, since their transforms would hold the loop, goes on beside all else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .background import Background
from .flow import Changes, Later
from .transform_worker import TransformWorker


class Deferrals:
    """One task for each event that is not done. ``apply`` carries out what it changes; ``turn`` follows."""

    def __init__(
        self, background: Background, *, apply: Callable[[Changes], None], turn: Callable[[], None]
    ) -> None:
        self.worker = TransformWorker()
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
        work, done = later.work, None
        if work is None:
            await asyncio.sleep(0)
        else:
            done = await self.worker.run(work)
        if later.is_over:
            return None
        changes = later.go_on(work, done)
        following, changes.later = changes.later, None
        self._apply(changes)
        self._turn()
        return following
