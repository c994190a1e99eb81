"""Published text shares its KV between tenants; what a tenant put behind it, or anywhere else, never does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kv_contents import Cache, i32, i64
from parrot._core import AttentionPlanner, OutOfBlocks

ONE, OTHER = 1, 2  # tenants
TEMPLATE = list(range(100, 137))  # ends inside the third block
SEAM = len(TEMPLATE)
SECRET = list(range(500, 520))


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache(num_blocks=64)
    yield cache
    cache.check()


def fill(cache: Cache, context_id: int, private: list[int], domain: int) -> int:
    return cache.prefill(context_id, TEMPLATE + private, domain=domain, public_len=SEAM)


def test_a_published_prefix_is_shared_and_nothing_behind_it(cache: Cache) -> None:
    assert fill(cache, 1, SECRET, ONE) == 0
    assert fill(cache, 2, SECRET, OTHER) == SEAM
    assert fill(cache, 3, SECRET, ONE) == SEAM + len(SECRET)
    assert fill(cache, 4, SECRET, OTHER) == SEAM + len(SECRET)
    cache.check()
    assert cache.table(1)[:2] == cache.table(2)[:2]
    assert not set(cache.table(1)[2:]) & set(cache.table(2)[2:])
    assert cache.table(3) == cache.table(1)


@pytest.mark.parametrize("length", [1, SEAM - 1, SEAM, SEAM + 1, SEAM + len(SECRET)])
def test_a_guess_of_a_private_prompt_finds_none_of_it(cache: Cache, length: int) -> None:
    """Whatever the guess claims to be published, what the other tenant filled as its own stays its own."""
    prompt = TEMPLATE + SECRET
    cache.prefill(1, prompt, domain=ONE)
    for context_id, public_len in enumerate((0, length // 2, length), start=2):
        assert cache.open(context_id, prompt[:length], domain=OTHER, public_len=public_len) == 0
        assert cache.tree.pending_prefix(OTHER, i32(prompt[:length]), public_len) == 0
    assert cache.open(9, prompt, domain=ONE) == len(prompt)


def test_a_longer_claim_finds_no_more_than_what_was_published(cache: Cache) -> None:
    fill(cache, 1, SECRET, ONE)
    for public_len in range(SEAM, SEAM + len(SECRET) + 1):
        guess = TEMPLATE + SECRET
        found = cache.tree.pending_prefix(OTHER, i32(guess), public_len)
        assert found == SEAM
    assert cache.tree.pending_prefix(ONE, i32(TEMPLATE + SECRET), SEAM - 1) == SEAM - 1


def test_published_tokens_that_another_tenant_computes_can_be_waited_for_and_private_ones_not(
    cache: Cache,
) -> None:
    prompt = TEMPLATE + SECRET
    cache.open(1, prompt, domain=ONE, public_len=SEAM)
    cache.reserve({1: TEMPLATE})
    assert cache.tree.pending_prefix(OTHER, i32(prompt), SEAM) == SEAM
    assert cache.open(2, prompt, domain=OTHER, public_len=SEAM) == 0
    cache.commit({1: TEMPLATE})
    cache.reserve({1: SECRET})
    assert cache.tree.pending_prefix(OTHER, i32(prompt), SEAM) == SEAM
    assert cache.tree.pending_prefix(ONE, i32(prompt), SEAM) == len(prompt)


def test_tenants_that_write_on_in_the_last_published_block_have_a_copy_each(cache: Cache) -> None:
    for context_id in (1, 2, 3):
        cache.open(context_id, TEMPLATE, domain=context_id, public_len=SEAM)
    cache.append(1, TEMPLATE)
    for context_id in (2, 3):
        cache.free(context_id)
        assert cache.open(context_id, TEMPLATE, domain=context_id, public_len=SEAM) == SEAM
    batch = {context_id: [1000 * context_id] for context_id in (1, 2, 3)}
    copies = cache.reserve(batch)
    cache.commit(batch)
    assert [row[2] for row in copies.tolist()] == [SEAM % 16] * 2
    assert len({cache.table(context_id)[2] for context_id in (1, 2, 3)}) == 3
    for step in range(30):
        for context_id in (1, 2, 3):
            cache.append(context_id, [1000 * context_id + step])
        cache.check()
    assert cache.tree.counters()["cow_copies"] == 2


def test_equal_text_of_many_tenants_behind_one_template_stays_apart(cache: Cache) -> None:
    for tenant in range(1, 31):
        assert fill(cache, tenant, [7], tenant) == (0 if tenant == 1 else SEAM)
    cache.check()
    for tenant in range(1, 31):
        assert fill(cache, 100 + tenant, [7, 8], tenant) == SEAM + 1
        assert cache.table(100 + tenant)[:2] == cache.table(30)[:2]
        cache.free(100 + tenant)
    for tenant in range(1, 31):
        cache.free(tenant)
    cache.tree.clear_cache()
    assert cache.tree.num_free_blocks == 64


def test_one_reservation_does_not_go_over_the_seam(cache: Cache) -> None:
    cache.open(1, TEMPLATE + SECRET, domain=ONE, public_len=SEAM)
    cache.append(1, TEMPLATE[:30])
    free = cache.tree.num_free_blocks
    with pytest.raises(ValueError, match=r"counts: 8 tokens behind the 30 of context 1 .* public_len of 37"):
        cache.reserve({1: [*TEMPLATE[30:], SECRET[0]]})
    assert cache.tree.num_free_blocks == free
    cache.append(1, TEMPLATE[30:])
    cache.append(1, SECRET)


@pytest.mark.parametrize("public_len", [-1, 6])
def test_public_len_is_checked(cache: Cache, public_len: int) -> None:
    for call in (
        lambda: cache.tree.open(1, ONE, i32([1] * 5), 5, public_len),
        lambda: cache.tree.pending_prefix(ONE, i32([1] * 5), public_len),
    ):
        with pytest.raises(ValueError, match=rf"public_len must be in .*= \[0, 5\], got {public_len}"):
            call()


def test_text_behind_a_fork_or_a_cut_inside_published_text_is_private(cache: Cache) -> None:
    """Neither verb knows what comes next: it need not be what was published there."""
    cache.prefill(1, TEMPLATE, domain=ONE, public_len=SEAM)
    cache.fork(2, 1, 20)
    cache.append(2, SECRET)
    cache.prefill(3, TEMPLATE, domain=ONE, public_len=SEAM)
    cache.truncate(3, 20)
    cache.append(3, SECRET)
    cache.prefill(4, TEMPLATE, domain=ONE, public_len=SEAM)
    for context_id, length in ((4, 0), (5, 0)):
        if context_id == 4:
            cache.truncate(4, length)
        else:
            cache.fork(5, 1, length)
        cache.append(context_id, SECRET)
    cache.check()
    leaked = TEMPLATE[:20] + SECRET
    assert cache.tree.pending_prefix(OTHER, i32(leaked), len(leaked)) == 20
    assert cache.tree.pending_prefix(OTHER, i32(SECRET), len(SECRET)) == 0
    assert cache.tree.pending_prefix(ONE, i32(SECRET)) == len(SECRET)


def test_evicting_one_tenant_leaves_the_published_prefix_and_the_other(cache: Cache) -> None:
    fill(cache, 1, SECRET, ONE)
    fill(cache, 2, SECRET, OTHER)
    cache.tree.release(1)
    cache.tree.clear_cache()
    assert cache.tree.take_evicted() == [(1, SEAM)]
    cache.contents[1] = tuple(TEMPLATE)
    cache.check()
    assert cache.tree.pending_prefix(ONE, i32(TEMPLATE + SECRET), SEAM) == SEAM
    assert cache.tree.pending_prefix(OTHER, i32(TEMPLATE + SECRET), SEAM) == SEAM + len(SECRET)
    cache.tree.release(2)
    cache.tree.clear_cache()
    assert sorted(cache.tree.take_evicted()) == [(1, 0), (2, 0)]
    cache.contents |= {1: (), 2: ()}
    assert cache.tree.num_free_blocks == 64


def test_a_preempted_tenant_comes_back_on_the_published_prefix(cache: Cache) -> None:
    small = Cache(num_blocks=6)
    fill(small, 1, SECRET, ONE)
    small.open(2, TEMPLATE + SECRET, domain=OTHER, public_len=SEAM)
    with pytest.raises(OutOfBlocks):
        small.reserve({2: [*SECRET, *SECRET]})
    small.free(1)
    small.append(2, SECRET)
    small.check()
    assert small.open(3, TEMPLATE + SECRET, domain=ONE, public_len=SEAM) >= SEAM
    small.check()


def test_attention_reads_a_published_prefix_once_for_all_tenants(cache: Cache) -> None:
    text = [*range(1000, 1000 + 128)]
    for tenant in (1, 2, 3):
        cache.prefill(tenant, [*text, *[tenant] * 5], domain=tenant, public_len=len(text))
    tables = np.full((3, 9), -1, np.int32)
    cache.tree.block_tables(i64(1, 2, 3), tables)
    entries, members = np.zeros((64, 8), np.int32), np.zeros((64, 2), np.int32)
    num_entries, _, _ = AttentionPlanner().plan(
        tables,
        i32([133] * 3),
        entries,
        members,
        np.zeros(4, np.int32),
        group_size=1,
        num_kv_heads=1,
        num_workers=1,
    )
    ranges = sorted((begin, end, count) for _, begin, end, _, count, *_ in entries[:num_entries].tolist())
    assert ranges == [(0, 128, 3)] + [(128, 133, 1)] * 3


def test_the_public_domain_has_no_seam(cache: Cache) -> None:
    cache.prefill(1, TEMPLATE + SECRET, domain=0, public_len=SEAM)
    assert cache.open(2, TEMPLATE + SECRET, domain=0) == SEAM + len(SECRET)
    assert cache.open(3, TEMPLATE + SECRET, domain=ONE, public_len=SEAM) == SEAM
