"""When objectives are deduced: for all labels of a turn of the loop together, for a large graph in slices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from .analysis import deduce, deducing
from .application import Application
from .call import Call
from .clock import now_us
from .flow import Changes
from .graph import Graph
from .pace import Pace
from .slices import run_in_slices

log = logging.getLogger(__name__)
_AGAIN_US = 10_000_000
AT_ONCE = (
    2048  # live calls, some 20 ms; of a larger graph the first calls may run before their labels are known
)


class ObjectiveOwner(Protocol):
    """What deduction asks of the executor."""

    def apply(self, changes: Changes) -> None:
        """Carry out what ended because its time had passed."""

    def turn(self) -> None:
        """Objectives have changed outside a turn."""


class Objectives:
    """Follows the sessions whose objectives may have to be deduced again. Lives on the loop."""

    def __init__(self, owner: ObjectiveOwner, update: Callable[[Call], None]) -> None:
        """``update`` is told of each call whose objective changed."""
        self.pace = Pace()
        self._owner = owner
        self._update = update
        self._stale: dict[Application, None] = {}
        self._running: dict[Application, asyncio.Task[None]] = {}

    def mark(self, application: Application) -> None:
        """Calls or labels have come."""
        self._stale[application] = None

    def closed(self, application: Application) -> None:
        """The application has nothing left to deduce."""
        self._stale.pop(application, None)

    def turn(self) -> None:
        """Deduce what is marked; what takes too long goes on between the turns of the loop."""
        while self._stale:
            application = next(iter(self._stale))
            del self._stale[application]
            if application not in self._running:
                self._deduce(application)

    def _expire(self, graph: Graph, now: int) -> None:
        changes = graph.expire(now)
        if changes.stopped:
            log.info("deadlines of session %s passed, %d calls stop", graph.session_id, len(changes.stopped))
        self._owner.apply(changes)

    def _deduce(self, application: Application) -> None:
        graph, now = application.session.graph, now_us()
        try:
            self._expire(graph, now)
            if graph.is_stale and len(graph.live) > AT_ONCE:
                task = asyncio.get_running_loop().create_task(self._deduce_in_slices(application, now))
                self._running[application] = task
                return
            changed = deduce(graph, now_us=now, pace=self.pace)
        except Exception:  # a wrong order is no reason not to run
            log.exception("objectives of session %s", application.session.session_id)
            self._review_at(application, now + _AGAIN_US)  # deadlines must still end
            return
        self._found(application, changed)

    async def _deduce_in_slices(self, application: Application, now: int) -> None:
        graph = application.session.graph
        changed: list[Call] = []
        try:
            changed = await run_in_slices(deducing(graph, now_us=now, pace=self.pace))
        except Exception:
            log.exception("objectives of session %s", application.session.session_id)
        del self._running[application]
        if application.closed:
            return
        self._found(application, changed)
        if graph.is_stale:  # something came meanwhile
            self.mark(application)
        self._owner.turn()

    def _found(self, application: Application, changed: Sequence[Call]) -> None:
        for call in changed:
            self._update(call)
        next_us = application.session.graph.next_time_us()
        self._review_at(application, next_us)

    def _review_at(self, application: Application, time_us: int | None) -> None:
        application.review_at(time_us, lambda: self._review(application))

    def _review(self, application: Application) -> None:
        """A deadline has passed, or has come near."""
        application.session.graph.is_stale = True
        self.mark(application)
        self._owner.turn()
