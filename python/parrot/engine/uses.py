"""What the manager says of the future of cached contexts, on its way into the context tree."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from .._core import ContextTree
from ..wire import ContextId, ContextUses

_INT32_MAX = 2**31 - 1


class PendingUses:
    """Collects messages between two steps, so that the tree takes one call per step. The last word counts."""

    def __init__(self) -> None:
        self._uses: dict[ContextId, tuple[int, int, int]] = {}

    def add(self, message: ContextUses) -> None:
        """Keep what a message says until the next step."""
        columns = (message.prefix_lengths, message.remaining_uses, message.steps_to_next_use)
        for context_id, *use in zip(message.context_ids, *columns, strict=False):
            length, remaining, steps = (min(max(value, 0), _INT32_MAX) for value in use)
            self._uses[context_id] = (length, remaining, steps)

    def apply(self, tree: ContextTree, cached: Container[ContextId]) -> int:
        """Tell the tree of those contexts that are cached, and forget the others; returns how many."""
        rows = [(context_id, *use) for context_id, use in self._uses.items() if context_id in cached]
        self._uses.clear()
        if rows:
            columns = np.array(rows, dtype=np.int64).T
            lengths, remaining, steps = np.ascontiguousarray(columns[1:], dtype=np.int32)
            tree.set_uses(np.ascontiguousarray(columns[0]), lengths, remaining, steps)
        return len(rows)

    def clear(self) -> None:
        """Forget everything."""
        self._uses.clear()
