"""Scheduler against judges: the best placement found by trying all, and simulated fleets under skew."""

from __future__ import annotations

import heapq
from collections import Counter

import numpy as np
import pytest
from bench.placement.driver import Cost, Driver, Ids, text
from bench.placement.fleets import CachingFleet
from bench.placement.small_cases import FLEETS, SIX_CALLS, over_best, over_best_of_random_cases


@pytest.mark.parametrize("name", SIX_CALLS)
@pytest.mark.parametrize("fleet", FLEETS)
def test_mean_finish_is_near_the_best_of_all_placements(name: str, fleet: str) -> None:
    assert 1 <= over_best(FLEETS[fleet], SIX_CALLS[name]) <= 1.10


@pytest.mark.parametrize("name", SIX_CALLS)
@pytest.mark.parametrize("fleet", FLEETS)
def test_a_group_ends_near_the_earliest_possible(name: str, fleet: str) -> None:
    assert 1 <= over_best(FLEETS[fleet], SIX_CALLS[name], group=True) <= 1.15


def test_over_random_calls_the_mean_finish_is_within_10_percent_of_the_best() -> None:
    cases = over_best_of_random_cases(24, seed=5)
    assert np.mean(cases) <= 1.06
    assert 1 <= min(cases) <= max(cases) <= 1.25


def zipf_prompt(rng: np.random.Generator, call_id: int, prefixes: list[Ids], weights: np.ndarray) -> Ids:
    family = int(rng.choice(len(prefixes), p=weights))
    return np.concatenate([prefixes[family], text(1_000 + call_id, 60)])


@pytest.mark.parametrize("prefix_len", [256, 2_000])
def test_skewed_prefixes_leave_no_engine_above_one_and_a_half_times_the_mean(prefix_len: int) -> None:
    num_engines, num_prefixes = 16, 64
    rng = np.random.default_rng(3)
    weights = 1 / np.arange(1, num_prefixes + 1) ** 1.1
    weights /= weights.sum()
    prefixes = [text(family, prefix_len) for family in range(num_prefixes)]
    driver = Driver.with_engines([Cost()] * num_engines)
    ends: list[tuple[int, int]] = []
    total = Counter[int]()
    busy = np.zeros(num_engines)
    hits = 0
    for call_id in range(2_500):
        now = 4_000 * call_id
        while ends and ends[0][0] <= now:
            _, ended = heapq.heappop(ends)
            driver.scheduler.finish(ended, now_us=now, context_id=ended + 1, num_tokens=prefix_len + 160)
        prompt = zipf_prompt(rng, call_id, prefixes, weights)
        driver.submit(call_id, prompt, boundaries=[prefix_len, prefix_len + 60], now=now, new=100)
        for placement in driver.scheduler.schedule(now):
            total[placement.engine_id] += 1
            hits += placement.prefix_len >= prefix_len
            batch = driver.load(placement.engine_id)[0]
            uncached = prefix_len + 60 - placement.prefix_len
            took = driver.costs[0].step_us(batch, uncached, 0) + 100 * driver.costs[0].step_us(batch, 0, 0)
            heapq.heappush(ends, (now + int(took), placement.call_id))
        if call_id >= 500:
            busy += [driver.load(engine_id)[0] for engine_id in range(num_engines)]
    driver.scheduler.check_invariants()
    assert driver.scheduler.num_queued == 0
    assert max(total.values()) <= 1.5 * np.mean(list(total.values()))
    assert busy.max() <= 1.5 * busy.mean()
    assert hits >= 0.8 * 2_500


@pytest.mark.parametrize("gap_us", [4_000, 8_000, 16_000])
def test_under_zipf_no_engine_has_half_as_much_again_and_caches_hit_as_if_placed_by_hand(gap_us: int) -> None:
    fleet = CachingFleet(gap_us)
    fleet.run(2_400)
    assert 1 <= fleet.most_over_mean <= 1.5
    assert 0.9 <= fleet.hits_over_best_static <= 1
