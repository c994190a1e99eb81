"""The native KV cache: a context always reads back the KV of exactly its own tokens, and no block leaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parrot._core import ContextTree, OutOfBlocks

I64 = npt.NDArray[np.int64]
Tokens = tuple[int, ...]


def i32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def i64(*values: int) -> I64:
    return np.array(values, np.int64)


def kv_of(domain: int, prefix: Tokens) -> int:
    """Stands for the KV of a prefix's last token: like the real one it depends on everything before it."""
    return hash((domain, prefix))


class Cache:
    """A ContextTree with the slots of a KV tensor behind it, and what every context must contain."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.tree = ContextTree(num_blocks, block_size)
        self.block_size = block_size
        self.kv = np.zeros((num_blocks, block_size), np.int64)
        self.domains: dict[int, int] = {}
        self.contents: dict[int, Tokens] = {}  # committed tokens
        self.reserved: dict[int, Tokens] = {}
        self.computed: dict[int, set[Tokens]] = {}  # domain -> every sequence that was ever committed

    def open(
        self, context_id: int, tokens: Sequence[int], max_prefix: int | None = None, domain: int = 0
    ) -> int:
        limit = len(tokens) if max_prefix is None else max_prefix
        length = self.tree.open(context_id, domain, i32(tokens), limit)
        self.domains[context_id], self.contents[context_id] = domain, tuple(tokens[:length])
        return length

    def fork(self, context_id: int, parent: int, length: int) -> None:
        self.tree.fork(context_id, parent, length)
        self.domains[context_id], self.contents[context_id] = (
            self.domains[parent],
            self.contents[parent][:length],
        )

    def reserve(self, batch: dict[int, Sequence[int]]) -> npt.NDArray[np.int32]:
        """Reserve, copy as told, and write garbage where the step is going to write."""
        tokens = [token for new in batch.values() for token in new]
        slots = np.full(len(tokens), np.iinfo(np.int32).max, np.int32)
        counts = i32([len(new) for new in batch.values()])
        copies = self.tree.reserve(i64(*batch), counts, i32(tokens), slots)
        for source, destination, num_slots in copies:
            self.kv[destination, :num_slots] = self.kv[source, :num_slots]
        assert len(set(slots.tolist())) == len(slots)
        self.kv.reshape(-1)[slots] = -1
        self.slots = slots
        self.reserved |= {context_id: tuple(new) for context_id, new in batch.items()}
        return copies

    def commit(self, batch: dict[int, Sequence[int]]) -> None:
        """Write the reserved slots of the last reserve, and commit."""
        values = []
        for context_id in batch:
            old, domain = self.contents[context_id], self.domains[context_id]
            new = self.contents[context_id] = old + self.reserved.pop(context_id)
            values += [kv_of(domain, new[: end + 1]) for end in range(len(old), len(new))]
            self.computed.setdefault(domain, set()).add(new)
        self.kv.reshape(-1)[self.slots] = values
        self.tree.commit(i64(*batch))

    def append(self, context_id: int, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        copies = self.reserve({context_id: tokens})
        self.commit({context_id: tokens})
        return copies

    def prefill(self, context_id: int, tokens: Sequence[int], max_prefix: int | None = None) -> int:
        matched = self.open(context_id, tokens, max_prefix)
        if matched < len(tokens):
            self.append(context_id, tokens[matched:])
        return matched

    def free(self, context_id: int) -> None:
        self.tree.free(context_id)
        for table in (self.contents, self.reserved, self.domains):
            table.pop(context_id, None)

    def table(self, context_id: int) -> list[int]:
        out = np.full((1, 1 + self.tree.num_blocks), np.iinfo(np.int32).max, np.int32)
        self.tree.block_tables(i64(context_id), out)
        length = len(self.contents[context_id]) + len(self.reserved.get(context_id, ()))
        num_blocks = -(-length // self.block_size)
        assert (out[0, num_blocks:] == -1).all()
        return [int(block) for block in out[0, :num_blocks]]

    def check(self) -> None:
        self.tree.check_invariants()
        for context_id, remaining in self.tree.take_evicted():
            assert remaining < len(self.contents[context_id])
            self.contents[context_id] = self.contents[context_id][:remaining]
        lengths = np.full(len(self.contents), -1, np.int32)
        self.tree.lengths(i64(*self.contents), lengths)
        for (context_id, tokens), length in zip(self.contents.items(), lengths, strict=True):
            assert length == len(tokens) + len(self.reserved.get(context_id, ()))
            assert tuple(self.tree.tokens(context_id)) == tokens
            slots = self.kv[self.table(context_id)].reshape(-1)[: len(tokens)]
            expected = [kv_of(self.domains[context_id], tokens[: end + 1]) for end in range(len(tokens))]
            assert slots.tolist() == expected


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    return same


TOKENS = st.lists(st.integers(0, 1), max_size=11).map(tuple)
NEW_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


class ContextTreeMachine(RuleBasedStateMachine):
    """Random verbs on a small cache with small blocks and two tokens: paths meet and part all the time."""

    @initialize(num_blocks=st.integers(4, 24), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.cache = Cache(num_blocks, block_size)
        self.held: set[int] = set()
        self.next_id = 1

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def pick(self, data: st.DataObject, ids: Any) -> int:
        return int(data.draw(st.sampled_from(sorted(ids))))

    @rule(tokens=TOKENS, domain=st.integers(0, 1), data=st.data())
    def open(self, tokens: Tokens, domain: int, data: st.DataObject) -> None:
        cache, limit = self.cache, data.draw(st.integers(0, len(tokens)))
        live = [cache.contents[c] for c in cache.contents if cache.domains[c] == domain]
        promised = max((shared_length(tokens[:limit], content) for content in live), default=0)
        possible = max((shared_length(tokens[:limit], c) for c in cache.computed.get(domain, ())), default=0)
        context_id = self.new_id()
        assert promised <= cache.open(context_id, tokens, limit, domain) <= possible
        self.held.add(context_id)

    @precondition(lambda self: self.cache.contents)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data, self.cache.contents)
        length = data.draw(st.integers(0, len(self.cache.contents[parent])))
        context_id = self.new_id()
        self.cache.fork(context_id, parent, length)
        self.held.add(context_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), outcome=st.sampled_from(["commit", "commit", "commit", "rollback", "leave open"]))
    def step(self, data: st.DataObject, outcome: str) -> None:
        cache, size = self.cache, self.cache.block_size
        idle = sorted(self.held - cache.reserved.keys())
        ids = data.draw(st.lists(st.sampled_from(idle), unique=True, max_size=4)) if idle else []
        batch = {c: data.draw(NEW_TOKENS) for c in ids}
        before = self.snapshot()
        most = sum(-(-(len(cache.contents[c]) % size + len(new)) // size) for c, new in batch.items())
        try:
            cache.reserve(batch)
        except OutOfBlocks:
            assert most > cache.tree.num_free_blocks + cache.tree.num_evictable_blocks
            assert self.snapshot() == before
            return
        if outcome == "commit":
            cache.commit(batch)
        elif outcome == "rollback":
            self.rollback(batch)
        for context_id in ids:
            prefix = cache.contents[context_id] + cache.reserved.get(context_id, ())
            assert cache.tree.pending_prefix(cache.domains[context_id], i32(prefix)) == len(prefix)

    def rollback(self, ids: Any) -> None:
        self.cache.tree.rollback(i64(*ids))
        for context_id in ids:
            del self.cache.reserved[context_id]

    def snapshot(self) -> list[object]:
        tree = self.cache.tree
        tables = [self.cache.table(c) for c in self.cache.contents]
        return [
            tables,
            tree.num_free_blocks,
            tree.num_evictable_blocks,
            tree.num_held_blocks,
            tree.counters(),
        ]

    @precondition(lambda self: self.cache.reserved)
    @rule(data=st.data())
    def abandon_step(self, data: st.DataObject) -> None:
        self.rollback([self.pick(data, self.cache.reserved)])

    @precondition(lambda self: self.held - self.cache.reserved.keys())
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        context_id = self.pick(data, self.held - self.cache.reserved.keys())
        length = data.draw(st.integers(0, len(self.cache.contents[context_id])))
        self.cache.tree.truncate(context_id, length)
        self.cache.contents[context_id] = self.cache.contents[context_id][:length]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        context_id = self.pick(data, self.held)
        self.cache.tree.release(context_id)
        self.cache.reserved.pop(context_id, None)
        self.held.remove(context_id)

    @precondition(lambda self: self.cache.contents)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        context_id = self.pick(data, self.cache.contents)
        self.cache.free(context_id)
        self.held.discard(context_id)

    @rule()
    def clear_cache(self) -> None:
        self.cache.tree.clear_cache()
        assert self.cache.tree.num_evictable_blocks == 0

    @invariant()
    def every_context_reads_back_its_own_tokens(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for context_id in list(self.cache.contents):
            self.cache.free(context_id)
        self.cache.tree.clear_cache()
        assert self.cache.tree.num_free_blocks == self.cache.tree.num_blocks
        self.cache.check()


TestContextTreeMachine = ContextTreeMachine.TestCase
TestContextTreeMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


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
    waiting, running, num_preempted = list(texts), list[int](), 0
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
                num_preempted += 1
                waiting.insert(0, running.pop())
                cache.free(waiting[0])
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
    assert num_preempted > 0
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


def int_max(*shape: int) -> npt.NDArray[np.int32]:
    return np.full(shape, np.iinfo(np.int32).max, np.int32)


def read_only(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    array.flags.writeable = False
    return array


INVALID_CALLS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("open", (1, 0, i32([1]), 1), ValueError, "context_id 1 is in use"),
    ("open", (0, 0, i32([1]), 1), ValueError, "context_id must be > 0, got 0"),
    ("open", (9, 0, i32([1]), 2), ValueError, r"max_prefix must be in .*\[0, 1\], got 2"),
    ("open", (9, 0, i32([1]), -1), ValueError, "max_prefix.*got -1"),
    ("open", (9, 0, i32([1, -5]), 0), ValueError, "token_ids must be >= 0, got -5 at index 1"),
    (
        "open",
        (9, 0, np.array([1.0]), 0),
        ValueError,
        r"token_ids: expected .*int32.*got dtype float64, shape \(1,\)",
    ),
    ("open", (9, 0, [1], 0), ValueError, "token_ids: expected .*list"),
    ("open", (9, 0, i32([1, 2, 3])[::2], 0), ValueError, r"token_ids: .*strides \(8,\)"),
    ("open", (9, 0, i32([[1]]), 0), ValueError, r"token_ids: .*shape \(1, 1\)"),
    ("fork", (1, 2, 0), ValueError, "context_id 1 is in use"),
    ("fork", (9, 77, 0), KeyError, "parent_context_id: no context has the id 77"),
    ("fork", (9, 1, 21), ValueError, r"length must be in \[0, 20\].*context 1, got 21"),
    ("fork", (9, 1, -1), ValueError, "got -1"),
    ("fork", (9, 1, 2**40), ValueError, "got 1099511627776"),
    ("pending_prefix", (0, i64(1)), ValueError, "token_ids: .*dtype int64"),
    ("reserve", (i64(1, 1), i32([1, 1]), i32([1, 2]), int_max(2)), ValueError, "context_ids has 1 twice"),
    ("reserve", (i64(77), i32([1]), i32([1]), int_max(1)), KeyError, "context_ids: no context has the id 77"),
    ("reserve", (i64(2), i32([1]), i32([1]), int_max(1)), ValueError, "context_ids 2 is cached, not held"),
    ("reserve", (i64(3), i32([1]), i32([1]), int_max(1)), ValueError, "3 has an open reservation already"),
    (
        "reserve",
        (i64(1), i32([0]), i32([]), int_max(0)),
        ValueError,
        "counts must be > 0, got 0 for context_id 1",
    ),
    (
        "reserve",
        (i64(1), i32([1, 1]), i32([1, 1]), int_max(2)),
        ValueError,
        "counts must have 1 entries.*got 2",
    ),
    ("reserve", (i64(1), i32([2]), i32([1]), int_max(1)), ValueError, r"sum\(counts\) = 2 entries, got 1"),
    ("reserve", (i64(1), i32([1]), i32([1]), int_max(2)), ValueError, "slots must have .* 1 entries, got 2"),
    ("reserve", (i64(1), i32([1]), i32([-1]), int_max(1)), ValueError, "got -1 at index 0"),
    (
        "reserve",
        (i64(1), i32([1]), i32([1]), read_only(int_max(1))),
        ValueError,
        "slots: the array is read-only",
    ),
    (
        "reserve",
        (i32([1]), i32([1]), i32([1]), int_max(1)),
        ValueError,
        "context_ids: expected .*int64.*int32",
    ),
    ("reserve", (i64(1), i32([2**31 - 1]), i32([1]), int_max(1)), ValueError, "= 2147483647 entries, got 1"),
    ("commit", (i64(1),), ValueError, "context_ids: 1 has no open reservation"),
    ("commit", (i64(3, 3),), ValueError, "context_ids has 3 twice"),
    ("rollback", (i64(3, 1),), ValueError, "context_ids: 1 has no open reservation"),
    ("truncate", (1, 21), ValueError, r"length must be in \[0, 20\].*got 21"),
    ("truncate", (3, 0), ValueError, "context_id 3 has an open reservation"),
    ("truncate", (2, 0), ValueError, "context_id 2 is cached"),
    ("release", (2,), ValueError, "context_id 2 is cached, not held"),
    ("release", (77,), KeyError, "77"),
    ("free", (77,), KeyError, "77"),
    ("tokens", (77,), KeyError, "77"),
    ("lengths", (i64(1, 2), int_max(3)), ValueError, "out must have 2 entries.*got 3"),
    ("lengths", (i64(1, 77), int_max(2)), KeyError, "77"),
    ("block_tables", (i64(1), int_max(1, 1)), ValueError, "rows of 1 blocks, but context 1 has 2"),
    ("block_tables", (i64(1), int_max(2, 2)), ValueError, "out must have 1 rows.*got 4 entries in rows of 2"),
    ("block_tables", (i64(1), int_max(2)), ValueError, r"out: .*2 dimension\(s\); got .*shape \(2,\)"),
    ("block_tables", (i64(1), int_max(4, 4).T[:1]), ValueError, "out: expected a C-contiguous array"),
]


@pytest.mark.parametrize(("verb", "arguments", "error", "match"), INVALID_CALLS)
def test_a_wrong_argument_is_named_with_its_value_and_changes_nothing(
    cache: Cache, verb: str, arguments: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    cache.prefill(1, range(20))
    cache.prefill(2, range(20, 40))
    cache.tree.release(2)
    cache.open(3, [])
    cache.reserve({3: [5]})
    before = [cache.tree.num_free_blocks, cache.tree.num_held_blocks, cache.tree.counters()]
    with pytest.raises(error, match=match):
        getattr(cache.tree, verb)(*arguments)
    assert [cache.tree.num_free_blocks, cache.tree.num_held_blocks, cache.tree.counters()] == before


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "match"),
    [(0, 16, "num_blocks.*got 0"), (1, 0, "block_size.*got 0"), (2**28, 16, r"134217727\].*got 268435456")],
)
def test_pool_sizes_out_of_range_are_refused(num_blocks: int, block_size: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ContextTree(num_blocks, block_size)
