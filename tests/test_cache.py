"""Contexts of calls that are done, in the engine."""

from __future__ import annotations

import numpy as np

from parrot._core import ContextTree
from parrot.engine.cache import CachedContexts
from parrot.wire import ContextId, ContextsEvicted, ContextSnapshot


def fill(tree: ContextTree, cached: CachedContexts, context_id: int, ids: list[int]) -> None:
    array = np.array(ids, dtype=np.int32)
    prefix = tree.open(context_id, 0, array, len(ids))
    rest, contexts = array[prefix:], np.array([context_id], dtype=np.int64)
    if len(rest):
        tree.reserve(contexts, np.array([len(rest)], np.int32), rest, np.empty(len(rest), np.int32))
        tree.commit(contexts)
    cached.keep(ContextId(context_id))


def test_a_snapshot_has_every_context_with_what_is_left_of_it() -> None:
    tree = ContextTree(4)
    cached = CachedContexts(tree, 100)
    assert cached.snapshot() == ContextSnapshot((), ())
    fill(tree, cached, 1, list(range(100, 132)))
    fill(tree, cached, 2, list(range(200, 216)))
    fill(tree, cached, 3, list(range(300, 332)))
    assert cached.take_evicted() == ContextsEvicted((ContextId(1),), (16,))
    assert cached.snapshot() == ContextSnapshot((1, 2, 3), (16, 16, 32))
    cached.free([ContextId(2), ContextId(9)])
    assert cached.snapshot() == ContextSnapshot((1, 3), (16, 32))
    tree.check_invariants()


def test_contexts_that_share_their_blocks_are_bounded_all_the_same() -> None:
    tree = ContextTree(4)
    cached = CachedContexts(tree, 3)
    for context_id in range(1, 6):
        fill(tree, cached, context_id, list(range(20)))
    report = cached.take_evicted()
    assert report == ContextsEvicted((ContextId(1), ContextId(2)), (0, 0))
    assert cached.snapshot() == ContextSnapshot((3, 4, 5), (20, 20, 20))
    assert cached.take_evicted() is None
    tree.check_invariants()
