"""Random verbs on the KV cache: every context reads back exactly its own tokens, and no block leaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_contents import Cache, Tokens, i32, i64, owned
from parrot._core import OutOfBlocks


def shared_length(left: Sequence[object], right: Sequence[object]) -> int:
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    return same


TOKENS = st.lists(st.integers(0, 1), max_size=11).map(tuple)
NEW_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


class ContextTreeMachine(RuleBasedStateMachine):
    """Small caches, small blocks and two tokens, so that paths meet and part all the time. Two tenants, the
    public domain, and prompts that are public up to any place."""

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

    @rule(tokens=TOKENS, domain=st.integers(0, 2), data=st.data())
    def open(self, tokens: Tokens, domain: int, data: st.DataObject) -> None:
        cache, limit = self.cache, data.draw(st.integers(0, len(tokens)))
        public_len = data.draw(st.integers(0, len(tokens)))
        wanted = owned(tokens[:limit], domain, public_len)
        live = [cache.owned(context_id) for context_id in cache.contents]
        promised = max((shared_length(wanted, content) for content in live), default=0)
        possible = max((shared_length(wanted, content) for content in cache.computed), default=0)
        context_id = self.new_id()
        assert promised <= cache.open(context_id, tokens, limit, domain, public_len) <= possible
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
        batch = {c: data.draw(NEW_TOKENS)[: cache.room(c)] for c in ids}
        before = self.snapshot()
        most = sum(-(-(len(cache.contents[c]) % size + len(new)) // size) for c, new in batch.items())
        try:
            cache.reserve(batch)
        except OutOfBlocks:
            assert most > cache.tree.num_free_blocks + cache.tree.num_evictable_blocks
            assert self.snapshot() == before
            return
        if data.draw(st.booleans()):
            cache.set_last_tokens({c: data.draw(st.integers(0, 2)) for c in batch})
        if outcome == "commit":
            cache.commit(batch)
        elif outcome == "rollback":
            self.rollback(batch)
        for context_id in ids:
            length = len(cache.contents[context_id]) + len(cache.reserved.get(context_id, ()))
            assert cache.pending_prefix(context_id) == length

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
        self.cache.truncate(context_id, length)

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

    @precondition(lambda self: self.cache.contents.keys() - self.held)
    @rule(data=st.data(), length=st.integers(0, 12), uses=st.integers(0, 2), steps=st.integers(0, 5))
    def hint(self, data: st.DataObject, length: int, uses: int, steps: int) -> None:
        context_id = self.pick(data, self.cache.contents.keys() - self.held)
        self.cache.tree.set_uses(i64(context_id), i32([length]), i32([uses]), i32([steps]))

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
