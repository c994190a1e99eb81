"""A lock that goes round by tenants and, within each, by sessions."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLock:
    """Whoever waits gets it when those who have it now are done and every other tenant had it once, and every
    other session of the same tenant once of that tenant's times. Within a session the first comes first."""

    def __init__(self) -> None:
        self._is_held = False
        # The front is next; what has had its turn goes to the back.
        self._waiting: OrderedDict[int, OrderedDict[str, deque[asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def held(self, tenant: int, session: str) -> AsyncIterator[None]:
        """Wait for it, and have it for a while."""
        mine = asyncio.get_running_loop().create_future()
        sessions = self._waiting.setdefault(tenant, OrderedDict())
        sessions.setdefault(session, deque()).append(mine)
        if not self._is_held:
            self._pass_on()
        try:
            await mine
            yield
        finally:
            if not mine.cancelled():
                self._pass_on()

    def _pass_on(self) -> None:
        self._is_held = False
        while self._waiting and not self._is_held:
            heir = self._take()
            if not heir.cancelled():
                heir.set_result(None)
                self._is_held = True

    def _take(self) -> asyncio.Future[None]:
        tenant, sessions = self._waiting.popitem(last=False)
        session, queue = sessions.popitem(last=False)
        heir = queue.popleft()
        if queue:
            sessions[session] = queue
        if sessions:
            self._waiting[tenant] = sessions
        return heir
