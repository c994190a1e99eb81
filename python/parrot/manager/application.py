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
    _review: asyncio.TimerHandle | None = None

    def review_at(self, time_us: int | None, review: Callable[[], None] | None = None) -> None:
        """Call ``review`` at that time of the manager's clock, and not at any time set before."""
        if self._review is not None:
            self._review.cancel()
            self._review = None
        if time_us is not None and review is not None:
            delay_s = max(0.0, (time_us - now_us()) / 1e6)
            self._review = asyncio.get_running_loop().call_later(delay_s, review)
