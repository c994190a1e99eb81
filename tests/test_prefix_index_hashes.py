"""Hashes of the prefix index: close prefixes differ, and what collides all the same stays exact."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from parrot._core import PrefixIndex, Scheduler
from parrot.config import SchedulerConfig
from parrot.manager import scheduler_bridge
from prefix_harness import KEY, ids


def test_hashes_differ_in_the_last_token_alone() -> None:
    for length in range(1, 8):  # the hash packs several tokens into a word, which may end unfinished
        index = PrefixIndex(KEY)
        for last in range(50):
            index.add_call(last + 1, 0, ids(*range(length - 1), last), ids(length))
        assert index.num_collisions == 0, length


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


def test_the_hash_key_has_16_bytes() -> None:
    with pytest.raises(ValueError, match="hash_key has 15 bytes"):
        PrefixIndex(bytes(15))


def test_the_hash_key_is_another_one_in_each_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []

    def recorded(*, hash_key: bytes, **options: Any) -> Scheduler:
        keys.append(hash_key)
        return Scheduler(hash_key=hash_key, **options)

    monkeypatch.setattr(scheduler_bridge, "Scheduler", recorded)
    for _ in range(3):
        scheduler_bridge.SchedulerBridge(SchedulerConfig())
    assert len(set(keys)) == 3
