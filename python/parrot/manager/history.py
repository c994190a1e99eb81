"""Recently ended calls: a bounded ring, for ``GET /v1/calls``."""

from __future__ import annotations

import itertools
from collections import deque

from ..api import CallView
from .call import Call
from .views import CallRecord

_CAPACITY = 4096


class History:
    """Keeps the last ended calls, oldest first."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._calls: deque[tuple[str, CallRecord]] = deque(maxlen=capacity)

    def add(self, tenant: str, call: Call) -> None:
        """A call of a tenant ended."""
        self._calls.append((tenant, CallRecord.of(call)))

    def last(self, limit: int, tenant: str | None = None) -> tuple[CallView, ...]:
        """The newest ``limit`` calls, of one tenant if given, oldest first."""
        found = (record for owner, record in reversed(self._calls) if tenant is None or owner == tenant)
        return tuple(record.view() for record in itertools.islice(found, limit))[::-1]
