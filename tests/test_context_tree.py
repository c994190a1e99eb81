"""The verbs of the KV cache: fork, copy on write, matching, eviction, preemption."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kv_contents import Cache, i32, i64
from parrot._core import ContextTree, OutOfBlocks


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache(num_blocks=64)
    yield cache
    cache.check()


def test_four_forks_diverging_inside_one_partial_block_each_read_their_own_text(cache: Cache) -> None:
    cache.prefill(1, range(21))
    for fork in range(2, 6):
        cache.fork(fork, 1, 21)
    batch = {fork: [100 * fork] for fork in range(2, 6)}
    copies = cache.reserve(batch)
    cache.commit(batch)
    shared = cache.table(1)[1]
    assert [(source, num_slots) for source, _, num_slots in copies.tolist()] == [(shared, 5)] * 3
    for step in range(20):
        for fork in range(2, 6):
            cache.append(fork, [100 * fork + step])
        cache.check()
    assert len({cache.table(fork)[1] for fork in range(2, 6)}) == 4
    assert {cache.table(fork)[0] for fork in range(1, 6)} == {cache.table(1)[0]}


def test_a_parent_that_goes_on_after_its_fork_wrote_gets_the_copy(cache: Cache) -> None:
    cache.prefill(1, range(5))
    cache.fork(2, 1, 5)
    assert len(cache.append(2, [70])) == 0
    assert cache.append(1, [71])[0, 2] == 5
    cache.check()


@pytest.mark.parametrize("offset", range(34))
def test_fork_at_every_offset_shares_whole_blocks_and_copies_the_partial_one(
    cache: Cache, offset: int
) -> None:
    cache.prefill(1, range(34))
    cache.fork(2, 1, offset)
    num_free = cache.tree.num_free_blocks
    copies = cache.append(2, [500])
    assert [row[2] for row in copies.tolist()] == ([offset % 16] if offset % 16 else [])
    assert cache.tree.num_free_blocks == num_free - 1
    assert cache.table(2)[: offset // 16] == cache.table(1)[: offset // 16]
    cache.append(1, [501])
    cache.check()


@pytest.mark.parametrize("length", [15, 16, 17, 47, 48, 49])
def test_a_fully_cached_prompt_around_a_block_edge_computes_one_token(cache: Cache, length: int) -> None:
    prompt = list(range(length))
    assert cache.prefill(1, prompt, length - 1) == 0
    cache.tree.release(1)
    for run in (2, 3):
        assert cache.prefill(run, prompt, length - 1) == length - 1
        cache.append(run, [900])
        cache.check()
        cache.tree.release(run)


def test_empty_contexts_and_forks_of_them_are_legal(cache: Cache) -> None:
    assert cache.open(1, []) == 0
    cache.fork(2, 1, 0)
    cache.tree.release(1)
    cache.fork(3, 1, 0)
    cache.append(2, [1, 2])
    cache.append(3, [1, 3])
    cache.check()
    cache.tree.truncate(2, 0)
    cache.contents[2] = ()
    assert cache.tree.num_held_blocks == 1


def test_reserved_tokens_are_pending_until_they_are_committed(cache: Cache) -> None:
    prompt = list(range(20))
    cache.open(1, prompt)
    cache.reserve({1: prompt})
    assert cache.tree.pending_prefix(0, i32([*prompt, 99])) == 20
    assert cache.open(2, prompt) == 0
    with pytest.raises(ValueError, match=r"length must be in \[0, 0\].*got 1"):
        cache.tree.fork(3, 1, 1)
    cache.commit({1: prompt})
    assert cache.open(4, prompt) == 20


def test_tokens_never_match_in_another_domain(cache: Cache) -> None:
    cache.prefill(1, range(32))
    assert cache.open(2, range(32), domain=1) == 0
    assert cache.tree.pending_prefix(1, i32(range(32))) == 0
    assert cache.tree.counters()["matched_tokens"] == 0
    assert cache.open(3, range(32)) == 32
    assert cache.tree.counters()["matched_tokens"] == 32


def test_the_longest_of_two_computed_twins_is_matched(cache: Cache) -> None:
    batch = {1: [1, 2, 3], 2: [1, 2, 3, 4]}
    for context_id in batch:
        cache.open(context_id, [])
    cache.reserve(batch)
    cache.commit(batch)
    cache.fork(3, 1, 3)
    cache.append(3, [4, 5, 6])
    assert cache.open(4, [1, 2, 3, 4, 9]) == 4
    assert cache.open(5, [1, 2, 3, 4, 5, 9]) == 5
    cache.check()


def test_reserve_takes_the_whole_batch_or_nothing(cache: Cache) -> None:
    cache.prefill(1, range(60 * 16))
    for context_id in (2, 3, 4):
        cache.open(context_id, [])
    before = cache.table(1), cache.tree.num_free_blocks, cache.tree.counters()
    with pytest.raises(OutOfBlocks, match="needs 5 blocks; 4 are free, 0 evictable, 60 held, of 64"):
        cache.reserve({2: [1], 3: [2] * 17, 4: [3] * 32})
    assert (cache.table(1), cache.tree.num_free_blocks, cache.tree.counters()) == before
    assert cache.tree.pending_prefix(0, i32([3])) == 0
    cache.reserve({2: [1], 3: [2], 4: [3] * 32})
    assert cache.tree.num_free_blocks == 0
    cache.tree.rollback(i64(2, 3, 4))
    cache.reserved.clear()
    assert cache.tree.num_free_blocks == 4


def test_two_contexts_that_write_behind_one_slot_need_a_copy_when_room_is_counted() -> None:
    cache = Cache(num_blocks=4)
    cache.prefill(1, range(4 * 16 - 11))
    cache.fork(2, 1, 53)
    with pytest.raises(OutOfBlocks, match="needs 1 blocks; 0 are free"):
        cache.reserve({1: [70], 2: [71]})
    assert len(cache.append(2, [71])) == 0
    with pytest.raises(OutOfBlocks, match="needs 1 blocks; 0 are free"):
        cache.reserve({1: [70]})
    cache.check()


def test_of_two_equal_twins_the_held_one_is_matched(cache: Cache) -> None:
    batch = {context_id: [1, 2, 3] for context_id in (1, 2, 3)}
    for context_id in batch:
        cache.open(context_id, [])
    cache.reserve(batch)
    cache.commit(batch)
    for context_id in (1, 3):
        cache.tree.release(context_id)
    cache.open(4, [1, 2, 3])
    assert cache.table(4) == cache.table(2)


def test_eviction_takes_freed_contexts_first_then_the_least_recently_used_from_its_end(cache: Cache) -> None:
    for context_id in (1, 2, 3, 4):
        cache.prefill(context_id, [context_id] * 256)
    for context_id in (2, 1, 3):
        cache.tree.release(context_id)
    cache.free(3)
    cache.open(5, [])
    cache.append(5, [5] * 16 * 16)
    assert cache.tree.take_evicted() == []
    assert cache.tree.pending_prefix(0, i32([3])) == 0
    cache.append(5, [5] * 10)
    assert cache.tree.take_evicted() == [(2, 240)]
    cache.contents[2] = (2,) * 240
    cache.append(5, [5] * 16 * 16)
    assert cache.tree.take_evicted() == [(2, 0), (1, 240)]
    cache.contents |= {2: (), 1: (1,) * 240}
    assert cache.tree.num_evictable_blocks == 15


def test_a_used_prefix_outlives_what_hangs_below_it(cache: Cache) -> None:
    cache.prefill(1, range(40))
    for fork in (2, 3):
        cache.fork(fork, 1, 40)
        cache.append(fork, [fork] * 16)
    for context_id in (1, 2):
        cache.tree.release(context_id)
    cache.tree.clear_cache()
    assert cache.tree.take_evicted() == [(2, 40)]
    cache.contents[2] = tuple(range(40))
    assert cache.open(4, range(40)) == 40


def test_a_context_that_was_freed_since_is_not_reported_as_evicted(cache: Cache) -> None:
    for context_id in (1, 2):
        cache.prefill(context_id, [context_id] * 20)
        cache.tree.release(context_id)
    cache.tree.clear_cache()
    cache.free(1)
    cache.prefill(1, [7])
    assert cache.tree.take_evicted() == [(2, 0)]
    cache.contents[2] = ()


def test_truncate_gives_back_what_only_this_context_used(cache: Cache) -> None:
    cache.prefill(1, range(20))
    cache.fork(2, 1, 18)
    cache.append(2, [77] * 40)
    cache.tree.truncate(2, 50)
    assert cache.tree.num_held_blocks == 2 + 3
    cache.tree.truncate(2, 5)
    assert cache.tree.num_held_blocks == 2
    assert cache.tree.num_evictable_blocks == 0
    cache.contents[2] = tuple(range(5))
    assert cache.append(2, [8]).tolist()[0][2] == 5


def test_distinct_tokens_are_counted_once_with_what_is_reserved(cache: Cache) -> None:
    cache.prefill(1, range(40))
    cache.fork(2, 1, 40)
    cache.fork(3, 1, 25)
    cache.append(3, [7, 8])
    cache.reserve({2: [9, 9, 9]})
    count = cache.tree.num_distinct_tokens
    assert [count(i64(c)) for c in (1, 2, 3)] == [40, 43, 27]
    assert [count(i64(1, 2)), count(i64(3, 1)), count(i64(2, 3, 1))] == [43, 42, 45]
    assert count(i64()) == 0
    with pytest.raises(KeyError, match="context_ids"):
        count(i64(1, 9))
    cache.commit({2: [9, 9, 9]})


def test_a_lone_context_fills_the_whole_pool_once_the_cache_is_cleared() -> None:
    cache = Cache(num_blocks=4)
    cache.prefill(1, range(20))
    cache.fork(2, 1, 20)
    cache.append(1, [50])
    cache.append(2, [60])
    for context_id in (1, 2):
        cache.free(context_id)
    cache.tree.clear_cache()
    cache.prefill(3, range(64))
    assert (cache.tree.num_held_blocks, cache.tree.num_free_blocks) == (4, 0)
    cache.check()


@pytest.mark.parametrize("prompt_length", range(13, 20))
def test_512_contexts_share_a_cache_for_40_with_preemption_at_every_offset(prompt_length: int) -> None:
    """A small engine loop: whoever does not fit is freed, and opened again on what is still cached."""
    num_steps, size = 8, 8
    cache = Cache(num_blocks=40 * -(-(prompt_length + num_steps) // size), block_size=size)
    prefix = list(range(prompt_length - 4))
    texts = {c: prefix + [c % 7, c % 5, c % 3, c] + [c * k for k in range(num_steps)] for c in range(1, 513)}
    waiting, running, num_preempted, offsets = list(texts), list[int](), 0, set[int]()
    while waiting or running:
        while waiting and len(running) < 64:
            running.append(waiting.pop(0))
            cache.open(running[-1], texts[running[-1]], prompt_length - 1)
        while True:
            lengths = {c: len(cache.contents[c]) for c in running}
            batch = {c: texts[c][n : max(n + 1, prompt_length)] for c, n in lengths.items()}
            try:
                cache.reserve(batch)
                break
            except OutOfBlocks:
                victim = running.pop(num_preempted % len(running))
                num_preempted += 1
                if lengths[victim] >= prompt_length:
                    offsets.add(lengths[victim] % size)
                waiting.insert(0, victim)
                cache.free(victim)
        cache.commit(batch)
        for done in [c for c in running if len(cache.contents[c]) == len(texts[c])]:
            assert cache.contents[done] == tuple(texts[done])
            running.remove(done)
            cache.tree.release(done)
            if done % 2:
                cache.free(done)
        if len(running) % 16 == 0:
            cache.check()
    cache.check()
    assert offsets == set(range(size))
    assert cache.tree.counters()["evicted_blocks"] > 0


@pytest.mark.parametrize("position", [15, 16, 17, 31, 32, 33])
def test_a_context_preempted_around_a_block_edge_comes_back_on_a_longer_prefix(position: int) -> None:
    cache = Cache(num_blocks=8)
    text = [*range(12), *range(100, 130)]
    cache.prefill(1, text[:12])
    cache.append(1, text[12:position])
    cache.free(1)
    cache.prefill(2, [*range(12), *range(200, 280)])  # evicts the end of the preempted one
    cache.check()
    cache.free(2)
    matched = cache.prefill(3, text)
    assert 12 <= matched <= position
    cache.check()


def test_a_reset_frees_everything_whatever_was_held_reserved_or_reported() -> None:
    cache = Cache(num_blocks=12)
    cache.prefill(1, range(40))
    cache.fork(2, 1, 20)
    cache.prefill(3, [7] * 20)
    cache.tree.release(3)
    cache.tree.reserve(i64(2), i32([5]), i32(range(5)), i32(range(5)))
    cache.tree.reset()
    cache.tree.check_invariants()
    assert (cache.tree.num_free_blocks, cache.tree.num_held_blocks) == (12, 0)
    assert cache.tree.take_evicted() == []
    fresh = Cache(num_blocks=12)
    fresh.tree = cache.tree
    assert fresh.open(1, range(40)) == 0
    fresh.append(1, range(40))
    fresh.check()


def seconds(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


@pytest.mark.parametrize("verb", ["check_invariants", "evict"])
def test_many_contexts_that_began_alike_at_once_cost_no_more_each(verb: str) -> None:
    """They are siblings of one key: none was there for the others to share when they began."""
    count = 32_000
    contexts = np.arange(1, count + 1, dtype=np.int64)

    def cost(first_tokens: np.ndarray) -> float:
        tree = ContextTree(count, 16)
        texts = np.column_stack((first_tokens, np.full(count, 6), np.full(count, 7))).astype(np.int32)
        for context, text in zip(contexts.tolist(), texts, strict=True):
            tree.open(context, 7, text, 0)
        slots = np.empty(texts.size, dtype=np.int32)
        tree.reserve(contexts, np.full(count, 3, dtype=np.int32), texts.ravel(), slots)
        tree.commit(contexts)
        if verb == "check_invariants":
            return seconds(tree.check_invariants)
        for context in contexts.tolist():
            tree.release(context)
        return seconds(tree.clear_cache)

    # Against as many that are no siblings: the same work on the same memory, whatever the machine.
    alike, different = zip(*((cost(np.full(count, 5)), cost(contexts)) for _ in range(5)), strict=True)
    assert min(alike) < 8 * min(different), "to walk the list for each of them takes 400 times as long"
