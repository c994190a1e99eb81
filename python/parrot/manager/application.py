"""A session while its calls run, as the executor and the scheduler know it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .clock import now_us
from .session import Session
from .single import SingleCall
from .tenants import Tenant


@dataclass(eq=False, slots=True)
class Application:
    """``number`` is its id in the scheduler. ``arrival_us`` is when its present calls began: a session that
    had nothing left to do arrives anew, so that a long-lived one is not always first. A one-call session has
    a ``single``; its context stays with the engine as a prefix cache, while those of other sessions are freed
    when they close."""

    number: int
    session: Session
    tenant: Tenant
    arrival_us: int
    single: SingleCall | None = None
    closed: bool = False
    _ran_us: int = 0
    _num_in_flight: int = 0
    _in_flight_since_us: int = 0
    _review: asyncio.TimerHandle | None = None

    def arrives(self, now: int) -> None:
        """Its present calls begin now."""
        self.arrival_us = now
        self._ran_us = 0
        self._in_flight_since_us = now

    def run_placed(self, now: int) -> None:
        """A run of one of its calls has an engine."""
        if self._num_in_flight == 0:
            self._in_flight_since_us = now
        self._num_in_flight += 1

    def run_left(self, now: int) -> None:
        """One of those runs has ended."""
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            self._ran_us += now - self._in_flight_since_us

    def ran_us(self, now: int) -> int:
        """For how long, since its arrival, an engine has had a call of it."""
        return self._ran_us + (now - self._in_flight_since_us if self._num_in_flight else 0)

    def review_at(self, time_us: int | None, review: Callable[[], None] | None = None) -> None:
        """Call ``review`` at that time of the manager's clock, and not at any time set before."""
        if self._review is not None:
            self._review.cancel()
            self._review = None
        if time_us is not None and review is not None:
            delay_s = max(0.0, (time_us - now_us()) / 1e6)
            self._review = asyncio.get_running_loop().call_later(delay_s, review)
