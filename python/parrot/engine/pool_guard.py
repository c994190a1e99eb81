"""Watching the KV cache's bookkeeping: free + evictable + held = all blocks, and nothing held for nobody."""

from __future__ import annotations

from collections.abc import Callable

from .._core import ContextTree
from ..errors import EngineError
from .stats import now_us

CHECK_EVERY_US = 10_000_000


class PoolGuard:
    """Checks a tree whole now and then, which takes 0.6 ms at 32,768 blocks and 3,000 contexts, and after
    every call that was the last one whether it left blocks held."""

    def __init__(self, clock: Callable[[], int] = now_us, check_every_us: int = CHECK_EVERY_US) -> None:
        self._clock = clock
        self._check_every_us = check_every_us
        self._due_us = clock() + check_every_us

    def check(self, tree: ContextTree, *, is_idle: bool) -> None:
        """Raise :class:`EngineError` that says what is wrong, if this is the time to look and something is.
        ``is_idle``: no call is there. Must not be called between reserve and commit."""
        if is_idle and tree.num_held_blocks:
            raise EngineError(f"{tree.num_held_blocks} blocks are held, and no call is there")
        if self._clock() < self._due_us:
            return
        self._due_us = self._clock() + self._check_every_us
        blocks = (tree.num_free_blocks, tree.num_evictable_blocks, tree.num_held_blocks)
        if min(blocks) < 0 or sum(blocks) != tree.num_blocks:
            raise EngineError(f"{blocks} blocks are free, evictable and held, of {tree.num_blocks}")
        try:
            tree.check_invariants()
        except Exception as error:
            raise EngineError(str(error)) from error
