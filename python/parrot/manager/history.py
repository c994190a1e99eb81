"""Recently ended calls: a bounded ring, for ``GET /v1/calls``."""

from __future__ import annotations

from collections import deque

from ..api import CallView

_CAPACITY = 4096


class History:
    """Keeps the last ended calls, oldest first."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._calls: deque[CallView] = deque(maxlen=capacity)

    def add(self, view: CallView) -> None:
        """A call ended."""
        self._calls.append(view)

    def last(self, limit: int) -> tuple[CallView, ...]:
        """The newest ``limit`` calls, oldest first."""
        return tuple(self._calls)[-limit:] if limit > 0 else ()
