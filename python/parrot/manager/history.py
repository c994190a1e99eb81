"""Recently ended calls: a bounded ring, for ``GET /v1/calls``."""

from __future__ import annotations

import itertools
from collections import deque

from ..api import CallView

_CAPACITY = 4096


class History:
    """Keeps the last ended calls, oldest first."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._calls: deque[tuple[str, CallView]] = deque(maxlen=capacity)

    def add(self, tenant: str, view: CallView) -> None:
        """A call of a tenant ended."""
        self._calls.append((tenant, view))

    def last(self, limit: int, tenant: str | None = None) -> tuple[CallView, ...]:
        """The newest ``limit`` calls, of one tenant if given, oldest first."""
        found = (view for owner, view in reversed(self._calls) if tenant is None or owner == tenant)
        return tuple(itertools.islice(found, limit))[::-1]
