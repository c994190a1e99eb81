"""PrefixIndex: who has which token prefix, exact under any hash, before and after variables have text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from parrot._core import PrefixIndex
from prefix_harness import KEY, Ids, ids


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
