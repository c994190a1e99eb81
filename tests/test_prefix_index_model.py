"""Random events in the prefix index against a dict of prefixes and their owners."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from parrot._core import PrefixIndex
from prefix_harness import KEY, ids

# A prefix is its domain with the length of the published text in front, and symbols: token ids, or -1 - id
# for a variable without a text.
Scope = tuple[int, int]
Prefix = tuple[Scope, tuple[int, ...]]
PUBLIC: Scope = (0, 0)
Owner = tuple[str, int]
SYMBOLS = st.lists(st.integers(-2, 2), max_size=6)
TOKENS = st.lists(st.integers(0, 2), max_size=6)
CUTS = st.sets(st.integers(1, 6), max_size=4)
SOME_CUTS = st.sets(st.integers(1, 6), min_size=1)


def prefix_of(scope: Scope, symbols: Sequence[int]) -> Prefix:
    domain, public_len = scope
    return (PUBLIC if domain == 0 or len(symbols) <= public_len else scope), tuple(symbols)


def draw_public_len(data: st.DataObject, symbols: Sequence[int], boundaries: Sequence[int]) -> int:
    """None of the prompt, or up to a boundary with no variable before it."""
    constant = [b for b in boundaries if min(symbols[:b]) >= 0]
    return data.draw(st.sampled_from([0, *constant]))


class IndexAgainstDict(RuleBasedStateMachine):
    """Every rule on the index and on a dict from owner to its prefixes."""

    constant_hash = False

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(KEY, constant_hash=self.constant_hash)
        self.owners: dict[Owner, set[Prefix]] = {}
        self.next_id = 1

    def keep(self, kind: str, scope: Scope, symbols: list[int], boundaries: list[int]) -> None:
        self.owners[kind, self.next_id] = {prefix_of(scope, symbols[:b]) for b in boundaries}
        self.next_id += 1

    @rule(domain=st.integers(0, 2), symbols=SYMBOLS, cut=CUTS, data=st.data())
    def add_call(self, domain: int, symbols: list[int], cut: set[int], data: st.DataObject) -> None:
        boundaries = sorted(b for b in cut if b <= len(symbols))
        public_len = draw_public_len(data, symbols, boundaries)
        prompt = ids(*symbols), ids(*boundaries)
        self.index.add_call(self.next_id, domain, *prompt, variables=[0, 1], public_len=public_len)
        self.keep("call", (domain, public_len), symbols, boundaries)

    @rule(domain=st.integers(0, 2), tokens=TOKENS, cut=CUTS, data=st.data())
    def add_context(self, domain: int, tokens: list[int], cut: set[int], data: st.DataObject) -> None:
        boundaries = sorted(b for b in cut if b <= len(tokens))
        public_len = draw_public_len(data, tokens, boundaries)
        self.index.add_context(self.next_id, domain, ids(*tokens), ids(*boundaries), public_len=public_len)
        self.keep("context", (domain, public_len), tokens, boundaries)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        kind, owner = data.draw(st.sampled_from(sorted(self.owners)))
        (self.index.remove_call if kind == "call" else self.index.remove_context)(owner)
        del self.owners[kind, owner]

    @precondition(lambda self: any(kind == "context" for kind, _ in self.owners))
    @rule(data=st.data(), length=st.integers(0, 6))
    def shorten(self, data: st.DataObject, length: int) -> None:
        owner = data.draw(st.sampled_from(sorted(key for key in self.owners if key[0] == "context")))
        self.index.shorten_context(owner[1], length)
        self.owners[owner] = {prefix for prefix in self.owners[owner] if len(prefix[1]) <= length}

    @rule(variable=st.integers(0, 1), text=st.lists(st.integers(0, 2), max_size=2))
    def set_variable(self, variable: int, text: list[int]) -> None:
        pending = -1 - variable
        waiting = [o for o, prefixes in self.owners.items() if any(pending in p for _, p in prefixes)]
        assert self.index.set_variable(variable, ids(*text)) == len(waiting)
        for owner in waiting:
            rewritten = {
                prefix_of(scope, [x for s in symbols for x in (text if s == pending else [s])])
                for scope, symbols in self.owners[owner]
            }
            self.owners[owner] = {prefix for prefix in rewritten if prefix[1]}

    @rule(domain=st.integers(0, 2), symbols=SYMBOLS, cut=SOME_CUTS, data=st.data())
    def match(self, domain: int, symbols: list[int], cut: set[int], data: st.DataObject) -> None:
        boundaries = sorted(b for b in cut if b <= len(symbols))
        public_len = draw_public_len(data, symbols, boundaries)
        scope = (domain, public_len)
        nearest: dict[int, list[Owner]] = {}
        for owner, prefixes in self.owners.items():
            shared = [b for b in boundaries if prefix_of(scope, symbols[:b]) in prefixes]
            if shared:
                nearest.setdefault(shared[-1], []).append(owner)
        options = {"variables": [0, 1], "public_len": public_len, "max_owners": 1_000}
        found = self.index.match(domain, ids(*symbols), ids(*boundaries), **options)
        assert [boundary for boundary, _, _ in found] == sorted(nearest, reverse=True)
        for boundary, calls, contexts in found:
            listed = [("call", owner) for owner in calls] + [("context", owner) for owner in contexts]
            assert sorted(listed) == sorted(nearest[boundary])

    @invariant()
    def holds_each_prefix_once(self) -> None:
        assert len(self.index) == len(set().union(*self.owners.values()))
        assert (self.index.num_collisions == 0) or self.constant_hash
        self.index.check_invariants()


class CollidingIndexAgainstDict(IndexAgainstDict):
    constant_hash = True


BOUNDED = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = BOUNDED
TestCollidingIndexAgainstDict = CollidingIndexAgainstDict.TestCase
TestCollidingIndexAgainstDict.settings = BOUNDED
