"""Fills a context tree the way an engine does: open, reserve and commit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parrot._core import ContextTree

Ids = npt.NDArray[np.int32]
BLOCK = 16


class Builder:
    """Appends committed tokens to the contexts of a tree of its own."""

    def __init__(self, num_blocks: int) -> None:
        self.tree = ContextTree(num_blocks, BLOCK)
        self._rng = np.random.default_rng(0)

    def text(self, length: int) -> Ids:
        return self._rng.integers(0, 30_000, length, dtype=np.int32)

    def extend(self, context_id: int, token_ids: Ids) -> None:
        """Reserve and commit in one step, as a prefill does."""
        name = np.array([context_id], np.int64)
        self.tree.reserve(name, np.array([len(token_ids)], np.int32), token_ids, np.empty_like(token_ids))
        self.tree.commit(name)

    def create(self, context_id: int, token_ids: Ids) -> None:
        """A held context on what is there of ``token_ids``, extended by the rest."""
        length = self.tree.open(context_id, 0, token_ids, len(token_ids))
        if length < len(token_ids):
            self.extend(context_id, token_ids[length:])
