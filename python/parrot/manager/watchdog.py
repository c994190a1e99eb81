"""Work that waits and does not get on: noticed, written down, told by ``/ready``, and given another try."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from ..config import ManagerConfig
from .call import Call
from .clock import now_s, now_us
from .dispatcher import Dispatcher
from .engines import Engine, EngineRegistry

log = logging.getLogger(__name__)
_NUM_SHOWN = 8
_LOOKS_PER_STALL = 4  # at all runs


@dataclass(slots=True)
class _Displaced:
    """Calls that were with an engine that made no step."""

    reason: str
    calls: list[Call]
    until: float


class Watchdog:
    """Looks at queue and engines once per heartbeat, and now and then at every run. A stalled *engine* is
    noticed by the registry, which gives it up; this class remembers its calls until they have ended
    elsewhere. A stalled *queue*, calls that wait although an engine has nothing to do, it notices itself, and
    a *run* that an engine has lost while it goes on with others."""

    def __init__(self, config: ManagerConfig, dispatcher: Dispatcher, registry: EngineRegistry) -> None:
        self._stall_after_s = config.stall_after_s
        self._look_at_runs_after = 0.0
        self._dispatcher = dispatcher
        self._registry = registry
        self._displaced: list[_Displaced] = []
        self._idle_since: float | None = None  # calls wait, and an engine has nothing to do
        self._queue_problem: str | None = None
        self.num_stalls = 0
        self.num_overdue = 0

    @property
    def problem(self) -> str | None:
        """Why the service is not ready although engines are there."""
        return self._queue_problem or (self._displaced[0].reason if self._displaced else None)

    def engine_stalled(self, engine: Engine, reason: str, calls: list[Call]) -> None:
        """An engine was given up; its calls go elsewhere."""
        self.num_stalls += 1
        self._dump(f"engine {engine.name} {reason}", calls)
        reason = f"engine {engine.name} {reason}; its {len(calls)} calls run elsewhere"
        self._displaced.append(_Displaced(reason, calls, now_s() + self._stall_after_s))

    def look(self) -> None:
        """A heartbeat has passed."""
        now = now_s()
        for displaced in self._displaced:
            displaced.calls = [call for call in displaced.calls if not call.ended]
        self._displaced = [one for one in self._displaced if one.calls and now < one.until]
        self._look_at_queue(now)
        if now >= self._look_at_runs_after:
            self._look_at_runs_after = now + self._stall_after_s / _LOOKS_PER_STALL
            self._look_at_runs()

    def _look_at_runs(self) -> None:
        now, after_us = now_us(), round(self._stall_after_s * 1e6)
        for run in self._dispatcher.runs:
            reason = run.overdue(now, after_us)
            if (
                reason is None
                or run.engine is None
                or self._dispatcher.run(run.run_id, run.engine) is not run
            ):
                continue  # it is in time, or has ended with one before it
            self.num_overdue += 1
            log.error("call %s of engine %s: %s", run.call.request_id, run.engine.name, reason)
            self._dispatcher.breached(run, run.engine, reason)
            self._dispatcher.turn()

    def _look_at_queue(self, now: float) -> None:
        idle = next((engine for engine in self._registry.usable if engine.num_dispatched == 0), None)
        if idle is None or self._dispatcher.num_queued == 0:
            if self._queue_problem is not None:
                log.warning("queued calls get on again")
            self._idle_since = self._queue_problem = None
            return
        self._idle_since = self._idle_since or now
        waited_s = now - self._idle_since
        if waited_s <= self._stall_after_s:
            return
        if self._queue_problem is None:
            self.num_stalls += 1
            self._dump(
                "calls wait although an engine has nothing to do",
                (run.call for run in self._dispatcher.runs if run.engine is None),
            )
        self._queue_problem = (
            f"{self._dispatcher.num_queued} calls wait for {waited_s:.0f} s although engine {idle.name} has "
            "nothing to do"
        )
        self._dispatcher.turn()

    def _dump(self, what: str, calls: Iterable[Call]) -> None:
        """The state, as far as it fits in one line of a log."""
        shown = [f"{call.request_id} ({call.name}, {call.state.value})" for call in islice(calls, _NUM_SHOWN)]
        engines = [
            f"{one.name}: {one.state}, {one.num_dispatched} calls, {one.stats}"
            for one in self._registry.alive[:_NUM_SHOWN]
        ]
        log.error(
            "%s; %d calls are queued, %d busy, among them %s; engines: %s",
            what,
            self._dispatcher.num_queued,
            self._dispatcher.num_busy,
            ", ".join(shown),
            " | ".join(engines),
        )
