"""Work that goes on for as long as the manager does, whatever one turn of it raises."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

log = logging.getLogger(__name__)
_PAUSE_S = 0.05  # after a turn that failed: one that fails at once must not take the whole loop


class Background:
    """The background loops of one manager. An exception ends a turn, never the loop: it is counted in
    ``failures`` by name and logged. A loop that has ended all the same is a ``problem``."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._ended: dict[str, str] = {}

    def start(self, name: str, turn: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Await ``turn`` again and again until the task is cancelled. ``name`` is of a closed set: it is a
        label of a metric."""
        task = asyncio.create_task(self._repeat(name, turn), name=name)
        task.add_done_callback(self._done)
        return task

    @contextlib.contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """For a part of a turn, or a timer, that must not keep the rest from happening."""
        try:
            yield
        except Exception as error:
            self.failed(name, error)

    def failed(self, name: str, error: Exception) -> None:
        """Count and log what ended a turn."""
        self.failures[name] += 1
        count = self.failures[name]
        # The first, second, fourth ... with its trace: what fails always would fill a log.
        trace = error if count & (count - 1) == 0 else None
        log.error("failure %d of %s: %s: %.300s", count, name, type(error).__name__, error, exc_info=trace)

    @property
    def problem(self) -> str | None:
        """Why the service should be started anew; None while every loop runs."""
        return "; ".join(f"the loop {name} has ended: {why}" for name, why in self._ended.items()) or None

    async def _repeat(self, name: str, turn: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await turn()
            except Exception as error:
                self.failed(name, error)
                await asyncio.sleep(_PAUSE_S)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        self._ended[task.get_name()] = (
            "it returned" if error is None else f"{type(error).__name__}: {error}"[:300]
        )
        log.critical("the loop %s has ended", task.get_name(), exc_info=error)
