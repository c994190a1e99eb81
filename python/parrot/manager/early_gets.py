"""Gets that have come before their submit: a client sends both at once, and they may take different ways."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NamedTuple

from ..errors import ErrorInfo, error_from_info

MAX_WAITING = 1024  # of one tenant
LONGEST_S = 20.0  # whatever a get's own time is


class SubmitKey(NamedTuple):
    """Which submit a get waits for, by the ids that its client chose."""

    tenant: str
    session_id: str
    submit_id: str


class EarlyGets:
    """Who waits for which submit. Lives on the loop.

    What is not there when a wait ends, because its time is over or its tenant has too many of them, is not
    there: the get then says so like any other.
    """

    def __init__(self) -> None:
        self._waiters: dict[SubmitKey, set[asyncio.Future[ErrorInfo | None]]] = {}
        self._num_waiting: Counter[str] = Counter()  # by tenant

    async def wait(self, submit: SubmitKey, timeout_ms: int | None) -> None:
        """Until the submit was taken, for so long at most. Raises what it was refused with."""
        if self._num_waiting[submit.tenant] >= MAX_WAITING:
            return
        waiter: asyncio.Future[ErrorInfo | None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(submit, set()).add(waiter)
        self._num_waiting[submit.tenant] += 1
        timeout_s = LONGEST_S if timeout_ms is None else min(timeout_ms / 1000, LONGEST_S)
        try:
            await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            self._forget(submit, waiter)
        refusal = waiter.result() if waiter.done() else None
        if refusal is not None:
            raise error_from_info(refusal)

    def wake(self, submit: SubmitKey, refusal: ErrorInfo | None = None) -> None:
        """The submit was taken, or refused."""
        for waiter in self._waiters.pop(submit, ()):
            if not waiter.done():
                waiter.set_result(refusal)

    def close(self, refusal: ErrorInfo) -> None:
        """End all waits: no submit is taken any more."""
        for submit in list(self._waiters):
            self.wake(submit, refusal)

    def _forget(self, submit: SubmitKey, waiter: asyncio.Future[ErrorInfo | None]) -> None:
        self._num_waiting[submit.tenant] -= 1
        if not self._num_waiting[submit.tenant]:
            del self._num_waiting[submit.tenant]
        waiters = self._waiters.get(submit)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[submit]
