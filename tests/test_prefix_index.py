"""PrefixIndex: who has which token prefix, exact under any hash, before and after variables have text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from parrot._core import PrefixIndex

Ids = npt.NDArray[np.int32]
KEY = bytes(range(16))


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int32)


@pytest.fixture(params=[False, True], ids=["keyed-hash", "constant-hash"])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    return PrefixIndex(KEY, constant_hash=request.param)


def test_each_owner_is_listed_once_at_the_longest_boundary_it_shares(index: PrefixIndex) -> None:
    index.add_call(1, 0, ids(5, 6, 7, 8), ids(2, 4))
    index.add_call(2, 0, ids(5, 6, 9), ids(2, 3))
    index.add_context(1, 0, ids(5, 6, 7), ids(1, 2, 3))
    index.add_context(2, 0, ids(5, 6, 7, 8), ids(4))
    assert index.match(0, ids(5, 6, 7, 8, 1), ids(1, 2, 3, 4, 5)) == [
        (4, [1], [2]),
        (3, [], [1]),
        (2, [2], []),
    ]
    assert index.match(0, ids(5, 6, 9), ids(1, 2, 3)) == [(3, [2], []), (2, [1], [1])]
    assert index.match(0, ids(9, 6), ids(1, 2)) == []


def test_the_nearest_and_then_the_newest_owners_are_listed_up_to_a_limit(index: PrefixIndex) -> None:
    for owner in range(1, 8):
        index.add_call(owner, 0, ids(1, 2), ids(1, 2) if owner in (2, 4) else ids(1))
        index.add_context(owner, 0, ids(1, 2), ids(1, 2) if owner in (3, 5) else ids(1))
    assert index.match(0, ids(1, 2), ids(1, 2), max_owners=1) == [(2, [4], [5])]
    assert index.match(0, ids(1, 2), ids(1, 2), max_owners=4) == [(2, [4, 2], [5, 3]), (1, [7, 6], [7, 6])]
    for owner in (1, 7):
        index.remove_call(owner)
        index.remove_context(owner)
    assert index.match(0, ids(1), ids(1)) == [(1, [6, 5, 4, 3, 2], [6, 5, 4, 3, 2])]


def test_prompts_cut_at_different_boundaries_match_where_both_are_cut(index: PrefixIndex) -> None:
    tokens = np.arange(10, dtype=np.int32)
    index.add_call(1, 0, tokens, ids(3, 8))
    index.add_call(2, 0, tokens, ids(5, 8))
    index.add_call(3, 0, tokens, ids(5))
    assert index.match(0, tokens, ids(5, 8)) == [(8, [2, 1], []), (5, [3], [])]
    index.remove_call(1)
    assert index.match(0, tokens, ids(3, 8)) == [(8, [2], [])]


def test_the_last_token_of_a_prefix_matters(index: PrefixIndex) -> None:
    index.add_call(1, 0, ids(1, 2, 3), ids(3))
    assert index.match(0, ids(1, 2, 4), ids(3)) == []
    index.add_call(2, 0, ids(1, 2, 4), ids(3))
    assert index.match(0, ids(1, 2, 3), ids(3)) == [(3, [1], [])]


def test_hashes_differ_in_the_last_token_alone() -> None:
    for length in range(1, 8):  # the hash packs several tokens into a word, which may end unfinished
        index = PrefixIndex(KEY)
        for last in range(50):
            index.add_call(last + 1, 0, ids(*range(length - 1), last), ids(length))
        assert index.num_collisions == 0, length


def test_a_prefix_is_not_confused_with_its_zero_padding(index: PrefixIndex) -> None:
    index.add_call(1, 0, ids(7), ids(1))
    assert index.match(0, ids(7, 0), ids(2)) == []
    assert index.match(0, ids(7, 0), ids(1, 2)) == [(1, [1], [])]


def test_equal_tokens_of_another_model_adapter_or_domain_never_match(index: PrefixIndex) -> None:
    tokens, cut = ids(1, 2, 3), ids(2, 3)
    index.add_call(1, 10, tokens, cut, model=1, adapter=2)
    scopes = [scope for scope in itertools.product((1, 2, 10, 11, -10, 0), repeat=3) if scope != (10, 1, 2)]
    for domain, model, adapter in scopes:
        assert index.match(domain, tokens, cut, model=model, adapter=adapter) == []
    for owner, (domain, model, adapter) in enumerate(scopes, 2):
        index.add_context(owner, domain, tokens, cut, model=model, adapter=adapter)
    assert index.match(10, tokens, cut, model=1, adapter=2) == [(3, [1], [])]


def test_published_text_matches_in_every_domain_and_what_follows_only_in_its_own(index: PrefixIndex) -> None:
    tokens, cut = ids(1, 2, 3, 4, 5, 6), ids(2, 4, 6)
    index.add_call(1, 7, tokens, cut, public_len=4)
    index.add_context(1, 7, tokens, cut, public_len=4)
    assert index.match(8, tokens, cut, public_len=4) == [(4, [1], [1])]
    assert index.match(7, tokens, cut, public_len=4) == [(6, [1], [1])]
    assert index.match(0, tokens, cut, public_len=4) == [(4, [1], [1])]
    # Text that is not said to be published, or not as far, is another prefix.
    assert index.match(7, tokens, cut) == index.match(8, tokens, cut) == []
    for claim in (2, 6):
        assert index.match(8, tokens, cut, public_len=claim) == [(min(claim, 4), [1], [1])]
    index.add_call(2, 8, tokens, cut, public_len=4)
    assert index.match(8, tokens, cut, public_len=4) == [(6, [2], []), (4, [1], [1])]
    index.remove_call(1)
    index.shorten_context(1, 4)
    assert index.match(7, tokens, cut, public_len=4) == [(4, [2], [1])]
    index.remove_context(1)
    index.remove_call(2)
    assert len(index) == 0
    index.check_invariants()


def test_a_value_that_comes_behind_published_text_stays_in_its_domain(index: PrefixIndex) -> None:
    for call_id, domain in ((1, 7), (2, 8)):
        index.add_call(call_id, domain, ids(1, 2, -1, 3), ids(2, 4), variables=[5], public_len=2)
    assert index.set_variable(5, ids(9)) == 2
    prompt = ids(1, 2, 9, 3), ids(2, 4)
    assert index.match(7, *prompt, public_len=2) == [(4, [1], []), (2, [2], [])]
    assert index.match(8, *prompt, public_len=2) == [(4, [2], []), (2, [1], [])]


@pytest.mark.parametrize(
    ("public_len", "message"),
    [
        (-1, r"public_len = -1 is not in \[0, 4\]"),
        (5, r"public_len = 5 is not in \[0, 4\]"),
        (3, "public_len = 3 is not one of boundaries"),
        (4, "public_len = 4 is behind the variable at 2"),
    ],
)
def test_public_len_is_a_boundary_of_constant_text(index: PrefixIndex, public_len: int, message: str) -> None:
    prompt = ids(1, 2, -1, 3), ids(2, 4)
    with pytest.raises(ValueError, match=message):
        index.add_call(1, 7, *prompt, variables=[5], public_len=public_len)
    with pytest.raises(ValueError, match=message):
        index.match(7, *prompt, variables=[5], public_len=public_len)
    assert len(index) == 0


def test_polynomial_neighbours_do_not_collide() -> None:
    index = PrefixIndex(KEY)
    rng = np.random.default_rng(1)
    base = rng.integers(100, 30_000, 24, dtype=np.int32)
    index.add_call(1, 0, base, ids(24))
    for position in range(23):
        shifted = base.copy()
        shifted[position] += 31
        shifted[position + 1] -= 1
        assert index.match(0, shifted, ids(24)) == []
    assert index.num_collisions == 0


def test_hashes_of_close_prefixes_and_domains_differ() -> None:
    index = PrefixIndex(KEY)
    prompts = [ids(*head, last) for head in ((), (0,), (0, 0), (1, 0), (0, 0, 0)) for last in range(50)]
    for owner, (domain, prompt) in enumerate(itertools.product((0, 1, 256, -1), prompts), 1):
        index.add_call(owner, domain, prompt, np.arange(1, len(prompt) + 1, dtype=np.int32))
    assert index.num_collisions == 0


def test_hashes_of_large_ids_differ_from_those_of_small_ones() -> None:
    index = PrefixIndex(KEY)
    prompts = itertools.product((0, 1, 2**21 - 1, 2**21, 2**21 + 1, 2**31 - 1), repeat=4)
    for owner, prompt in enumerate(prompts, 1):
        index.add_call(owner, 0, ids(*prompt), ids(1, 2, 3, 4))
    assert len(index) == 6 + 6**2 + 6**3 + 6**4
    assert index.num_collisions == 0


def test_a_forced_collision_of_many_prefixes_stays_exact() -> None:
    index = PrefixIndex(KEY, constant_hash=True)
    prompts = [ids(i, i + 1, 2 * i) for i in range(60)]
    for owner, prompt in enumerate(prompts, 1):
        index.add_call(owner, 0, prompt, ids(2, 3))
    for owner, prompt in enumerate(prompts, 1):
        assert index.match(0, prompt, ids(2, 3)) == [(3, [owner], [])]
    assert index.num_collisions > 0
    for owner in range(1, 61, 2):
        index.remove_call(owner)
    index.check_invariants()
    assert index.match(0, prompts[0], ids(2, 3)) == []
    assert index.match(0, prompts[1], ids(2, 3)) == [(3, [2], [])]


@pytest.mark.parametrize("largest", [0xFFFF, 0x10000, 0xFFFFFF, 0x1000000, 2**31 - 1])
@pytest.mark.parametrize("length", [5, 300])
def test_ids_of_every_size_are_kept_exactly(largest: int, length: int, index: PrefixIndex) -> None:
    prompt = np.arange(length, dtype=np.int32)
    prompt[length // 2] = largest
    index.add_call(1, 0, prompt, ids(length))
    assert index.match(0, prompt, ids(length)) == [(length, [1], [])]
    for other in (largest - 0x10000, largest - 0x1000000, largest - 1, largest & 0xFFFF):
        if 0 <= other != largest:
            prompt[length // 2] = other
            assert index.match(0, prompt, ids(length)) == []


def test_removal_leaves_nothing_behind(index: PrefixIndex) -> None:
    tokens = np.arange(100, dtype=np.int32)
    for owner in range(1, 20):
        index.add_call(owner, 0, tokens, ids(owner, 50, 100))
        index.add_context(owner, 0, tokens, ids(owner, 50, 100))
    assert len(index) == 21
    for owner in range(19, 0, -1):
        index.remove_call(owner)
        index.check_invariants()
    assert index.match(0, tokens, ids(1)) == [(1, [], [1])]
    for owner in range(1, 20):
        index.remove_context(owner)
    index.check_invariants()
    assert len(index) == 0
    assert index.match(0, tokens, np.arange(1, 101, dtype=np.int32)) == []
    index.add_call(1, 0, tokens, ids(100))
    assert index.match(0, tokens, ids(50, 100)) == [(100, [1], [])]


def test_every_entry_is_found_while_the_table_grows_and_shrinks() -> None:
    index = PrefixIndex(KEY)
    rng = np.random.default_rng(4)
    prompts = rng.integers(0, 30_000, (6_000, 20), dtype=np.int32)
    live: set[int] = set()
    for size in (6_000, 1_000, 3_000, 10, 6_000, 0):
        for owner in rng.permutation(len(prompts)) + 1:
            if len(live) < size and owner not in live:
                index.add_call(int(owner), 0, prompts[owner - 1], ids(8, 20))
                live.add(int(owner))
            elif len(live) > size and owner in live:
                index.remove_call(int(owner))
                live.remove(int(owner))
        index.check_invariants()
        assert len(index) == 2 * size
        for owner, prompt in enumerate(prompts, 1):
            assert index.match(0, prompt, ids(20)) == ([(20, [owner], [])] if owner in live else [])


def test_memory_goes_back_when_entries_go() -> None:
    index = PrefixIndex(KEY)
    prompts = np.random.default_rng(3).integers(0, 30_000, (80_000, 40), dtype=np.int32)
    sizes, left = [], []
    for _ in range(2):
        for owner, prompt in enumerate(prompts, 1):
            index.add_call(owner, 0, prompt, ids(40))
        sizes.append(index.num_bytes)
        for owner in range(1, len(prompts) + 1):
            index.remove_call(owner)
        left.append(index.num_bytes)
    assert 80_000 * 64 < sizes[0] == sizes[1] < 80_000 * 400
    assert left[0] == left[1] < sizes[0] / 2  # the first chunk of every array, which is kept


def test_shorten_drops_only_the_boundaries_beyond(index: PrefixIndex) -> None:
    index.add_context(1, 0, ids(1, 2, 3, 4), ids(2, 3, 4))
    index.add_context(2, 0, ids(1, 2, 3, 4), ids(4))
    index.shorten_context(1, 3)
    assert index.match(0, ids(1, 2, 3, 4), ids(2, 3, 4)) == [(4, [], [2]), (3, [], [1])]
    index.shorten_context(1, 0)
    assert index.match(0, ids(1, 2, 3, 4), ids(2, 3, 4)) == [(4, [], [2])]
    index.remove_context(1)
    index.remove_context(2)
    assert len(index) == 0


def test_calls_that_share_a_pending_variable_are_found_before_it_has_text(index: PrefixIndex) -> None:
    index.add_call(1, 0, ids(7, -1, 8), ids(1, 2, 3), variables=[40])
    index.add_call(2, 0, ids(7, -1, 9), ids(1, 2, 3), variables=[40])
    index.add_call(3, 0, ids(7, -1, 8), ids(1, 2, 3), variables=[41])
    wanted = ids(7, -2, 9), ids(1, 2, 3)
    assert index.match(0, *wanted, variables=[41, 40]) == [(3, [2], []), (2, [1], []), (1, [3], [])]
    assert index.match(0, ids(7, 40, 9), ids(1, 2, 3)) == [(1, [3, 2, 1], [])]


def test_a_call_whose_variable_is_set_matches_prompts_that_had_the_text_all_along(index: PrefixIndex) -> None:
    index.add_context(5, 0, ids(7, 1, 2, 3, 8), ids(1, 4, 5))
    index.add_call(1, 0, ids(7, -1, 8), ids(1, 2, 3), variables=[40])
    index.add_call(2, 0, ids(7, -1, -2, 9), ids(1, 2, 3, 4), variables=[40, 41])
    assert index.match(0, ids(7, 1, 2, 3, 8), ids(1, 4, 5)) == [(5, [], [5]), (1, [2, 1], [])]
    assert index.set_variable(40, ids(1, 2, 3)) == 2
    assert index.match(0, ids(7, 1, 2, 3, 8), ids(1, 4, 5)) == [(5, [1], [5]), (4, [2], [])]
    assert index.match(0, ids(7, -1), ids(1, 2), variables=[40]) == [(1, [2, 1], [5])]
    assert index.set_variable(40, ids(6)) == 0
    assert index.set_variable(41, ids()) == 1
    assert index.match(0, ids(7, 1, 2, 3, 9), ids(4, 5)) == [(5, [2], []), (4, [1], [5])]
    index.check_invariants()


def test_a_variable_may_stand_in_one_prompt_several_times(index: PrefixIndex) -> None:
    index.add_call(1, 0, ids(-1, 5, -1, -2), ids(1, 2, 3, 4), variables=[3, 4])
    assert index.set_variable(3, ids(8, 9)) == 1
    assert index.match(0, ids(8, 9, 5, 8, 9, -1), ids(6), variables=[4]) == [(6, [1], [])]
    index.remove_call(1)
    assert index.set_variable(4, ids(1)) == 0
    index.check_invariants()
    assert len(index) == 0


def test_an_empty_text_joins_the_boundaries_before_and_behind_it(index: PrefixIndex) -> None:
    index.add_call(1, 0, ids(-1, 5, -2), ids(1, 2, 3), variables=[3, 4])
    index.set_variable(3, ids())
    index.set_variable(4, ids())
    assert index.match(0, ids(5, 6), ids(1, 2)) == [(1, [1], [])]
    assert len(index) == 1


def test_a_variable_is_told_from_any_token(index: PrefixIndex) -> None:
    index.add_call(1, 0, ids(7, -1), ids(1, 2), variables=[0])
    for token in (0, 1, 2**31 - 1):
        assert index.match(0, ids(7, token), ids(2)) == []
    assert index.match(0, ids(7, -1), ids(2), variables=[2**63 - 1]) == []


def test_bad_arguments_are_named_with_their_values(index: PrefixIndex) -> None:
    index.add_call(1, 0, ids(1, 2), ids(2))
    index.add_context(1, 0, ids(1, 2), ids(2))
    with pytest.raises(ValueError, match="call_id = 1 is there already"):
        index.add_call(1, 0, ids(1, 2), ids(2))
    with pytest.raises(ValueError, match="context_id = 1 is there already"):
        index.add_context(1, 0, ids(1, 2), ids(2))
    for bad in (0, -1, 2**62):
        with pytest.raises(ValueError, match=f"call_id = {bad}"):
            index.add_call(bad, 0, ids(1, 2), ids(2))
    with pytest.raises(KeyError, match="call_id = 9"):
        index.remove_call(9)
    with pytest.raises(KeyError, match="context_id = 9"):
        index.shorten_context(9, 1)
    with pytest.raises(ValueError, match="length = -1"):
        index.shorten_context(1, -1)
    with pytest.raises(ValueError, match=r"boundaries\[1\] = 2"):
        index.add_call(2, 0, ids(1, 2, 3), ids(2, 2))
    with pytest.raises(ValueError, match=r"boundaries\[0\] = 4"):
        index.match(0, ids(1, 2, 3), ids(4))
    with pytest.raises(ValueError, match=r"boundaries\[0\] = 0"):
        index.match(0, ids(1, 2, 3), ids(0))
    with pytest.raises(ValueError, match=r"token_ids\[1\] = -5"):
        index.add_call(2, 0, ids(1, -5), ids(1))
    with pytest.raises(ValueError, match=r"token_ids\[1\] = -2 is below -len\(variables\) = -1"):
        index.add_call(2, 0, ids(1, -2), ids(1), variables=[3])
    with pytest.raises(ValueError, match=r"variables\[0\] = -3"):
        index.match(0, ids(1, -1), ids(1), variables=[-3])
    with pytest.raises(ValueError, match="variable_id = -1"):
        index.set_variable(-1, ids(1))
    with pytest.raises(ValueError, match="max_owners = 0"):
        index.match(0, ids(1), ids(1), max_owners=0)
    index.check_invariants()
    assert len(index) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.array([1, 2], dtype=np.int64), "token_ids has type int64"),
        (np.zeros((2, 2), dtype=np.int32), r"token_ids of shape \(2, 2\)"),
        (np.arange(8, dtype=np.int32)[::2], r"token_ids of shape \(4,\)"),
        ([1, 2], "token_ids has type <class 'list'>"),
    ],
)
def test_other_arrays_than_flat_int32_are_refused(bad: Ids, message: str, index: PrefixIndex) -> None:
    with pytest.raises(ValueError, match=message):
        index.add_call(1, 0, bad, ids(1))


def test_the_hash_key_has_16_bytes() -> None:
    with pytest.raises(ValueError, match="hash_key has 15 bytes"):
        PrefixIndex(bytes(15))


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
