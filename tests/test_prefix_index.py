"""PrefixIndex: who has which token prefix, exact under any hash."""

from __future__ import annotations

import itertools

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


def test_match_lists_every_held_boundary_longest_first(index: PrefixIndex) -> None:
    index.insert(1, 0, ids(5, 6, 7, 8), ids(2, 4))
    index.insert(2, 0, ids(5, 6, 9), ids(2, 3))
    assert index.match(0, ids(5, 6, 7, 8, 1), ids(2, 4, 5)) == [(4, [1]), (2, [1, 2])]
    assert index.match(0, ids(5, 6, 9), ids(1, 2, 3)) == [(3, [2]), (2, [1, 2])]


def test_prompts_cut_at_different_boundaries_match_where_both_are_cut(index: PrefixIndex) -> None:
    tokens = np.arange(10, dtype=np.int32)
    index.insert(1, 0, tokens, ids(3, 8))
    index.insert(2, 0, tokens, ids(5, 8))
    assert index.match(0, tokens, ids(5, 8)) == [(8, [1, 2]), (5, [2])]
    index.remove(1)
    assert index.match(0, tokens, ids(3, 8)) == [(8, [2])]


def test_the_last_token_of_a_prefix_matters(index: PrefixIndex) -> None:
    index.insert(1, 0, ids(1, 2, 3), ids(3))
    assert index.match(0, ids(1, 2, 4), ids(3)) == []


def test_a_prefix_is_not_confused_with_its_zero_padding(index: PrefixIndex) -> None:
    index.insert(1, 0, ids(7), ids(1))
    assert index.match(0, ids(7, 0), ids(2)) == []
    assert index.match(0, ids(7, 0), ids(1, 2)) == [(1, [1])]


def test_equal_tokens_of_another_model_adapter_or_domain_never_match(index: PrefixIndex) -> None:
    tokens, cut = ids(1, 2, 3), ids(2, 3)
    index.insert(1, 10, tokens, cut, model=1, adapter=2)
    scopes = [scope for scope in itertools.product((1, 2, 10, 11, -10, 0), repeat=3) if scope != (10, 1, 2)]
    for domain, model, adapter in scopes:
        assert index.match(domain, tokens, cut, model=model, adapter=adapter) == []
    assert index.match(10, tokens, cut, model=1, adapter=2) == [(3, [1]), (2, [1])]
    for owner, (domain, model, adapter) in enumerate(scopes, 2):
        index.insert(owner, domain, tokens, cut, model=model, adapter=adapter)
    assert index.match(10, tokens, cut, model=1, adapter=2) == [(3, [1]), (2, [1])]


def test_polynomial_neighbours_do_not_collide() -> None:
    index = PrefixIndex(KEY)
    rng = np.random.default_rng(1)
    base = rng.integers(100, 30_000, 24, dtype=np.int32)
    index.insert(1, 0, base, ids(24))
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
        index.insert(owner, domain, prompt, np.arange(1, len(prompt) + 1, dtype=np.int32))
    assert index.num_collisions == 0


def test_a_forced_collision_of_many_prefixes_stays_exact() -> None:
    index = PrefixIndex(KEY, constant_hash=True)
    prompts = [ids(i, i + 1, 2 * i) for i in range(60)]
    for owner, prompt in enumerate(prompts, 1):
        index.insert(owner, 0, prompt, ids(2, 3))
    for owner, prompt in enumerate(prompts, 1):
        assert index.match(0, prompt, ids(2, 3)) == [(3, [owner]), (2, [owner])]
    assert index.num_collisions > 0
    for owner in range(1, 61, 2):
        index.remove(owner)
    assert index.match(0, prompts[0], ids(2, 3)) == []
    assert index.match(0, prompts[1], ids(2, 3)) == [(3, [2]), (2, [2])]


def test_removal_leaves_nothing_behind(index: PrefixIndex) -> None:
    tokens = np.arange(100, dtype=np.int32)
    for owner in range(1, 20):
        index.insert(owner, 0, tokens, ids(owner, 50, 100))
    assert len(index) == 21
    for owner in range(19, 0, -1):
        index.remove(owner)
    assert len(index) == 0
    assert index.match(0, tokens, np.arange(1, 101, dtype=np.int32)) == []
    index.insert(1, 0, tokens, ids(100))
    assert index.match(0, tokens, ids(50, 100)) == [(100, [1])]


def test_shorten_drops_only_the_boundaries_beyond(index: PrefixIndex) -> None:
    index.insert(1, 0, ids(1, 2, 3, 4), ids(2, 3, 4))
    index.insert(2, 0, ids(1, 2, 3, 4), ids(4))
    index.shorten(1, 3)
    assert index.match(0, ids(1, 2, 3, 4), ids(2, 3, 4)) == [(4, [2]), (3, [1]), (2, [1])]
    index.shorten(1, 0)
    assert index.match(0, ids(1, 2, 3, 4), ids(2, 3, 4)) == [(4, [2])]
    index.remove(1)
    index.remove(2)
    assert len(index) == 0


def test_bad_arguments_are_named_with_their_values(index: PrefixIndex) -> None:
    index.insert(1, 0, ids(1, 2), ids(2))
    with pytest.raises(ValueError, match="owner = 1 is there already"):
        index.insert(1, 0, ids(1, 2), ids(2))
    with pytest.raises(ValueError, match="owner = 0"):
        index.insert(0, 0, ids(1, 2), ids(2))
    with pytest.raises(KeyError, match="owner = 9"):
        index.remove(9)
    with pytest.raises(KeyError, match="owner = 9"):
        index.shorten(9, 1)
    with pytest.raises(ValueError, match="length = -1"):
        index.shorten(1, -1)
    with pytest.raises(ValueError, match=r"boundaries\[1\] = 2"):
        index.insert(2, 0, ids(1, 2, 3), ids(2, 2))
    with pytest.raises(ValueError, match=r"boundaries\[0\] = 4"):
        index.match(0, ids(1, 2, 3), ids(4))
    with pytest.raises(ValueError, match=r"boundaries\[0\] = 0"):
        index.match(0, ids(1, 2, 3), ids(0))
    with pytest.raises(ValueError, match=r"token_ids\[1\] = -5"):
        index.insert(2, 0, ids(1, -5), ids(1))
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
        index.insert(1, 0, bad, ids(1))


def test_the_hash_key_has_16_bytes() -> None:
    with pytest.raises(ValueError, match="hash_key has 15 bytes"):
        PrefixIndex(bytes(15))


Prefix = tuple[int, tuple[int, ...]]


class IndexAgainstDict(RuleBasedStateMachine):
    """Every rule on the index and on a dict from owner to its prefixes."""

    constant_hash = False

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(KEY, constant_hash=self.constant_hash)
        self.owners: dict[int, set[Prefix]] = {}
        self.next_owner = 1

    @rule(
        domain=st.integers(0, 1),
        tokens=st.lists(st.integers(0, 2), max_size=6),
        cut=st.sets(st.integers(1, 6), max_size=4),
    )
    def insert(self, domain: int, tokens: list[int], cut: set[int]) -> None:
        boundaries = sorted(b for b in cut if b <= len(tokens))
        self.index.insert(self.next_owner, domain, ids(*tokens), ids(*boundaries))
        self.owners[self.next_owner] = {(domain, tuple(tokens[:b])) for b in boundaries}
        self.next_owner += 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        self.index.remove(owner)
        del self.owners[owner]

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), length=st.integers(0, 6))
    def shorten(self, data: st.DataObject, length: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        self.index.shorten(owner, length)
        self.owners[owner] = {prefix for prefix in self.owners[owner] if len(prefix[1]) <= length}

    @rule(domain=st.integers(0, 1), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def match(self, domain: int, tokens: list[int]) -> None:
        expected = []
        for length in range(len(tokens), 0, -1):
            wanted = (domain, tuple(tokens[:length]))
            owners = sorted(owner for owner, prefixes in self.owners.items() if wanted in prefixes)
            if owners:
                expected.append((length, owners))
        assert self.index.match(domain, ids(*tokens), ids(*range(1, len(tokens) + 1))) == expected

    @invariant()
    def holds_each_prefix_once(self) -> None:
        assert len(self.index) == len(set().union(*self.owners.values()))


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
