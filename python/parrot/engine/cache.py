"""Contexts of calls that are done: they keep their names until they are evicted, freed, or too many."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from .._core import ContextTree
from ..wire import ContextId, ContextsEvicted, ContextSnapshot


class CachedContexts:
    """The newest ``limit`` of them; many can end in the same few blocks, so that blocks do not bound them."""

    def __init__(self, tree: ContextTree, limit: int) -> None:
        self._tree = tree
        self._limit = limit
        self._contexts: dict[ContextId, None] = {}  # the oldest first

    def __contains__(self, context_id: object) -> bool:
        return context_id in self._contexts

    def keep(self, context_id: ContextId) -> None:
        """A held context is one of them from now on."""
        self._tree.release(context_id)
        self._contexts[context_id] = None

    def free(self, context_ids: Iterable[ContextId]) -> None:
        """Forget contexts; others than these are left alone."""
        for context_id in context_ids:
            if context_id in self._contexts:
                del self._contexts[context_id]
                self._tree.free(context_id)

    def clear(self) -> None:
        """Forget all."""
        self.free(list(self._contexts))

    def start_anew(self) -> ContextsEvicted | None:
        """The tree was reset: all are gone."""
        gone = tuple(self._contexts)
        self._contexts.clear()
        return ContextsEvicted(gone, (0,) * len(gone)) if gone else None

    def take_evicted(self) -> ContextsEvicted | None:
        """Those that lost tokens since the last time, or are the oldest of too many; what has nothing left
        is forgotten."""
        evicted = [(ContextId(c), left) for c, left in self._tree.take_evicted() if c in self._contexts]
        too_many = max(0, len(self._contexts) - self._limit)
        evicted += [(context_id, 0) for context_id in islice(self._contexts, too_many)]
        if not evicted:
            return None
        self.free([context_id for context_id, left in evicted if left == 0])
        context_ids, remaining = zip(*evicted, strict=True)
        return ContextsEvicted(context_ids, remaining)

    def snapshot(self) -> ContextSnapshot:
        """All of them."""
        context_ids = tuple(self._contexts)
        lengths = np.empty(len(context_ids), dtype=np.int32)
        self._tree.lengths(np.array(context_ids, dtype=np.int64), lengths)
        return ContextSnapshot(context_ids, tuple(lengths.tolist()))
