"""A session while its calls run, as the executor and the scheduler know it."""

from __future__ import annotations

from dataclasses import dataclass

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
