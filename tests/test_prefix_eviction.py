"""Which cached tokens go first: what has no name, what has no use, the farthest next use, the oldest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_contents import Cache, i32, i64
from parrot._core import OutOfBlocks

UNKNOWN_STEPS, LAPSE_POOLS = 16, 8


@dataclass(eq=False)
class Token:
    """One cached token and the block that it has alone: the blocks of this model hold one token each."""

    parent: Token | None
    depth: int
    children: dict[int, Token] = field(default_factory=dict)
    contexts: set[int] = field(default_factory=set)
    num_holders: int = 0
    last_use: int = 0

    def path(self) -> Iterator[Token]:
        token = self
        while token.parent is not None:
            yield token
            token = token.parent


class Model:
    """A trie of tokens that looks at every leaf each time one has to go."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.num_free = num_blocks
        self.root = Token(None, 0)
        self.ends: dict[int, Token] = {}
        self.held: set[int] = set()
        self.hints: dict[int, tuple[int, int, int] | None] = {}  # None: no use; else reach, steps, lapse
        self.tick = self.num_evicted = 0

    def match(self, tokens: Sequence[int]) -> Token:
        here = self.root
        for token in tokens:
            if token not in here.children:
                break
            here = here.children[token]
        return here

    def prefill(self, context_id: int, tokens: Sequence[int]) -> bool:
        """Hold what is there and add the rest; False if it does not fit, and then what is there is held."""
        here = self.match(tokens)
        self._hold(context_id, here)
        if not self._make_room(len(tokens) - here.depth):
            return False
        for token in tokens[here.depth :]:
            here.children[token] = here = Token(here, here.depth + 1)
            self.num_free -= 1
        self.ends[context_id].contexts.discard(context_id)
        for token in self.ends[context_id].path():
            token.num_holders -= 1
        self._hold(context_id, here)
        return True

    def _hold(self, context_id: int, end: Token) -> None:
        self.ends[context_id] = end
        self.held.add(context_id)
        end.contexts.add(context_id)
        for token in end.path():
            token.num_holders += 1

    def release(self, context_id: int) -> None:
        self.tick += 1
        self.held.remove(context_id)
        for token in self.ends[context_id].path():
            token.num_holders -= 1
            if token.num_holders == 0:
                token.last_use = self.tick

    def free(self, context_id: int) -> None:
        if context_id in self.held:
            self.release(context_id)
        self.ends.pop(context_id).contexts.remove(context_id)
        self.hints.pop(context_id, None)

    def set_use(self, context_id: int, length: int, uses: int, steps: int) -> None:
        reach = min(length, self.ends[context_id].depth)
        lapse = self.num_evicted + LAPSE_POOLS * self.num_blocks
        self.hints[context_id] = (reach, steps, lapse) if uses and reach else None

    def _leaves(self) -> Iterator[Token]:
        stack = [self.root]
        while stack:
            token = stack.pop()
            stack += token.children.values()
            if not token.children and token.parent is not None and token.num_holders == 0:
                yield token

    def _worth(self, leaf: Token) -> tuple[int, int, int]:
        steps = []
        for context_id in leaf.contexts:
            hint = self.hints.get(context_id, (leaf.depth, UNKNOWN_STEPS, 0))
            if hint is not None and hint[0] >= leaf.depth:
                steps.append(hint[1])
        if steps:
            return (2, -min(steps), leaf.last_use)
        return (1 if leaf.contexts else 0, 0, leaf.last_use)

    def _make_room(self, needed: int) -> bool:
        if needed > self.num_free + self.num_evictable:
            return False
        if needed > self.num_free:
            lapsed = [c for c, hint in self.hints.items() if hint is not None and hint[2] <= self.num_evicted]
            for context_id in lapsed:
                del self.hints[context_id]
        while needed > self.num_free:
            self._evict(min(self._leaves(), key=self._worth))
        return True

    def _evict(self, leaf: Token) -> None:
        assert leaf.parent is not None
        token = next(token for token, child in leaf.parent.children.items() if child is leaf)
        del leaf.parent.children[token]
        for context_id in leaf.contexts:
            self.ends[context_id] = leaf.parent
            leaf.parent.contexts.add(context_id)
        self.num_free += 1
        self.num_evicted += 1

    @property
    def num_evictable(self) -> int:
        stack, count = list(self.root.children.values()), 0
        while stack:
            token = stack.pop()
            stack += token.children.values()
            count += token.num_holders == 0
        return count


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)


class EvictionMachine(RuleBasedStateMachine):
    """The tree evicts exactly what the model evicts."""

    @initialize(num_blocks=st.integers(5, 14))
    def start(self, num_blocks: int) -> None:
        self.cache = Cache(num_blocks, block_size=1)
        self.model = Model(num_blocks)
        self.texts: set[tuple[int, ...]] = set()
        self.next_id = 1

    @rule(tokens=TEXTS, keep=st.integers(0, 4))
    def run_a_call(self, tokens: tuple[int, ...], keep: int) -> None:
        """Mostly to its end; now and then it goes on holding what it has."""
        context_id = self.next_id
        self.next_id += 1
        self.texts.add(tokens)
        fits = self.model.prefill(context_id, tokens)
        try:
            self.cache.prefill(context_id, tokens)
            assert fits
        except OutOfBlocks:
            assert not fits
        if keep or not fits:
            self.release(context_id)

    def release(self, context_id: int) -> None:
        self.model.release(context_id)
        self.cache.tree.release(context_id)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def end_a_call(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(sorted(self.model.held))))

    @precondition(lambda self: self.model.ends)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        context_id = data.draw(st.sampled_from(sorted(self.model.ends)))
        self.model.free(context_id)
        self.cache.free(context_id)

    @precondition(lambda self: self.model.ends.keys() - self.model.held)
    @rule(data=st.data())
    def hint(self, data: st.DataObject) -> None:
        cached = sorted(self.model.ends.keys() - self.model.held)
        ids = data.draw(st.lists(st.sampled_from(cached), unique=True, max_size=4))
        hints = [
            (
                data.draw(st.integers(0, 8)),
                data.draw(st.sampled_from([0, 1, 3])),
                data.draw(st.sampled_from([0, 1, 5, 15, 16, 17, 30])),
            )
            for _ in ids
        ]
        self.cache.tree.set_uses(i64(*ids), *(i32([hint[k] for hint in hints]) for k in range(3)))
        for context_id, hint in zip(ids, hints, strict=True):
            self.model.set_use(context_id, *hint)

    @invariant()
    def the_same_tokens_are_left(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert self.cache.tree.num_free_blocks == self.model.num_free
        assert {c: len(tokens) for c, tokens in self.cache.contents.items()} == {
            context_id: end.depth for context_id, end in self.model.ends.items()
        }
        for text in self.texts:
            assert self.cache.tree.pending_prefix(0, i32(text)) == self.model.match(text).depth


TestEvictionMachine = EvictionMachine.TestCase
TestEvictionMachine.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def cached(cache: Cache, texts: dict[int, Sequence[int]]) -> None:
    """Each text as a cached context, the first one the oldest."""
    for context_id, text in texts.items():
        cache.prefill(context_id, text)
        cache.tree.release(context_id)


def hint(cache: Cache, **hints: tuple[int, int, int]) -> None:
    """``c7=(length, uses, steps)`` for context 7."""
    columns = list(zip(*hints.values(), strict=True))
    cache.tree.set_uses(i64(*(int(name[1:]) for name in hints)), *(i32(column) for column in columns))


def lose_blocks(cache: Cache, num_blocks: int) -> dict[int, int]:
    """What contexts have left after so many blocks were evicted, in that order."""
    cache.prefill(99, [9] * (num_blocks + cache.tree.num_free_blocks) * cache.block_size)
    evicted = dict(cache.tree.take_evicted())
    for context_id, length in evicted.items():
        cache.contents[context_id] = cache.contents[context_id][:length]
    cache.check()
    cache.free(99)
    cache.tree.check_invariants()
    return evicted


def test_no_use_goes_before_a_far_use_before_a_near_one_whatever_their_age() -> None:
    cache = Cache(num_blocks=4, block_size=4)
    cached(cache, {1: [1] * 4, 2: [2] * 4, 3: [3] * 4, 4: [4] * 4})
    hint(cache, c1=(4, 1, 2), c2=(4, 1, 7), c3=(4, 5, 0), c4=(4, 0, 0))
    assert list(lose_blocks(cache, 3)) == [4, 2, 1]


def test_contexts_without_hints_go_in_order_of_their_last_use_between_near_and_far_ones() -> None:
    cache = Cache(num_blocks=4, block_size=4)
    cached(cache, {1: [1] * 4, 2: [2] * 4, 3: [3] * 4, 4: [4] * 4})
    hint(cache, c1=(4, 1, UNKNOWN_STEPS - 1), c4=(4, 1, UNKNOWN_STEPS + 1))
    assert list(lose_blocks(cache, 3)) == [4, 2, 3]


def test_what_a_call_added_to_a_prefix_that_is_needed_again_goes_and_the_prefix_stays() -> None:
    cache = Cache(num_blocks=6, block_size=4)
    cached(cache, {1: [*range(10), 70, 71], 2: [2] * 12})
    hint(cache, c1=(10, 3, 1), c2=(12, 1, 2))
    assert lose_blocks(cache, 3) == {1: 10, 2: 0}


@pytest.mark.parametrize(("steps", "lost"), [(1, {1: 8, 2: 8, 3: 0}), (5, {1: 0, 2: 0})])
def test_a_shared_prefix_is_worth_what_its_nearest_user_is(steps: int, lost: dict[int, int]) -> None:
    cache = Cache(num_blocks=6, block_size=4)
    cached(cache, {1: [*[1] * 8, 10], 2: [*[1] * 8, 20], 3: [3] * 8})
    hint(cache, c1=(8, 1, 3), c2=(8, 1, steps), c3=(8, 1, 2))
    assert lose_blocks(cache, 4) == lost


def test_a_hint_lapses_when_pools_of_blocks_were_evicted_without_news() -> None:
    cache = Cache(num_blocks=4, block_size=4)
    cached(cache, {1: [1] * 4})
    hint(cache, c1=(4, 1, 0))
    for round_number in range(LAPSE_POOLS * 4 // 3 + 1):
        assert 1 in cache.contents
        assert cache.tree.pending_prefix(0, i32([1] * 4)) == 4
        cached(cache, {2 + round_number: [2] * 12})
        cache.free(2 + round_number)
        cached(cache, {100 + round_number: [3] * 12})
        cache.check()
        cache.free(100 + round_number)
    cached(cache, {500: [5] * 4, 501: [6] * 8})
    assert lose_blocks(cache, 1) == {1: 0}


def test_a_hint_counts_for_nothing_once_its_context_is_freed() -> None:
    cache = Cache(num_blocks=3, block_size=4)
    cached(cache, {1: [1] * 4, 2: [2] * 4, 3: [3] * 4})
    hint(cache, c3=(4, 1, 0))
    cache.free(3)
    assert lose_blocks(cache, 1) == {}
    assert cache.tree.pending_prefix(0, i32([3])) == 0
