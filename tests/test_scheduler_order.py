"""Scheduler: which call goes first, and that none waits for ever."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from bench.placement.driver import Cost, Driver, text
from bench.placement.small_cases import calls_per_engine

# --- order -----------------------------------------------------------------------------------------------


def one_at_a_time(**options: object) -> Driver:
    return Driver.with_engines([Cost(max_batch_size=1)], **options)


def drain(driver: Driver, now: int = 0) -> list[int]:
    """Run the engine call by call; the order in which calls were placed."""
    order: list[int] = []
    while placed := driver.schedule(now):
        order += placed
        for call_id in placed:
            driver.finish(call_id, now=now)
    return order


def test_a_call_inherits_the_arrival_of_its_application() -> None:
    driver = one_at_a_time()
    driver.submit(1, app=1, arrival=50, now=100)
    driver.submit(2, app=2, arrival=60, now=60)
    driver.submit(3, app=1, arrival=50, now=200)
    assert drain(driver, 200) == [1, 3, 2]


def test_without_application_order_a_call_goes_by_its_own_submit() -> None:
    driver = one_at_a_time(application_order=False)
    driver.submit(1, app=1, arrival=50, now=100)
    driver.submit(2, app=2, arrival=60, now=60)
    driver.submit(3, app=1, arrival=50, now=200)
    assert drain(driver, 200) == [2, 1, 3]


def test_within_an_application_the_deepest_call_goes_first_then_the_lowest_id() -> None:
    driver = one_at_a_time()
    for call_id, depth in ((1, 0), (2, 2), (3, 1), (4, 2)):
        driver.submit(call_id, app=1, arrival=0, depth=depth)
    assert drain(driver) == [2, 4, 3, 1]


def test_a_latency_bound_call_overtakes_throughput_work_for_one_aging_time() -> None:
    driver = one_at_a_time(aging_us=1_000)
    driver.submit(1, now=0)
    driver.submit(2, now=900, latency=True)
    driver.submit(3, now=1_100, latency=True)
    assert drain(driver, 1_100) == [2, 1, 3]


def test_a_task_group_is_as_urgent_as_the_consumer_that_waits_for_it() -> None:
    driver = one_at_a_time(group_placement=False)
    driver.submit(1, app=1, arrival=0, now=0, group=0)
    driver.submit(2, app=2, arrival=5, now=5, latency=True)
    driver.submit(3, app=3, arrival=1, now=5)
    assert drain(driver, 5) == [1, 2, 3]


def test_without_objective_awareness_labels_do_not_order_calls() -> None:
    driver = one_at_a_time(objective_aware=False)
    driver.submit(1, now=0)
    driver.submit(2, now=1, latency=True)
    assert drain(driver, 1) == [1, 2]


def test_an_application_that_never_ends_does_not_shut_out_a_stranger() -> None:
    driver = one_at_a_time(aging_us=1_000)
    driver.submit(0, app=1, arrival=0, now=100_000)
    driver.submit(1, app=2, arrival=100_000, now=100_000)
    waited_us = 0
    for step in range(2, 1_000):
        now = 100_000 + 100 * step
        driver.submit(step, app=1, arrival=0, now=now)
        (placed,) = driver.schedule(now)
        driver.finish(placed, now=now)
        if placed == 1:
            waited_us = now - 100_000
            break
    assert 0 < waited_us <= 7_000


def test_an_application_that_waits_for_its_turn_keeps_its_place_and_one_that_runs_long_does_not() -> None:
    """Both came before the stranger by more than the time that a place is kept."""
    order = {}
    for ran_us in (6_000, 6_001):
        driver = one_at_a_time(aging_us=1_000)
        driver.submit(1, app=1, arrival=0, now=100_000, app_ran_us=ran_us)
        driver.submit(2, app=2, arrival=50_000, now=50_000)
        order[ran_us] = drain(driver, 100_000)
    assert order == {6_000: [1, 2], 6_001: [2, 1]}


def test_without_aging_work_that_nobody_waits_for_comes_last_however_old() -> None:
    def order(**options: object) -> list[int]:
        driver = one_at_a_time(aging_us=1_000, **options)
        driver.submit(1, now=0)
        driver.submit(2, now=9_000, latency=True)
        return drain(driver, 9_000)

    assert (order(), order(aging=False)) == ([1, 2], [2, 1])


def test_without_aging_no_engine_is_held_for_a_call_that_does_not_fit() -> None:
    def first_served(**options: object) -> int:
        """Small calls fill the room that one of them leaves; a large one needs that of two."""
        driver = Driver.with_engines([Cost(capacity_tokens=1_000)], aging_us=50_000, **options)
        for call_id in range(4):
            driver.submit(call_id)
        running = list(driver.schedule())
        driver.submit(99, text(99, 450), now=1_000)
        for step in range(4, 60):
            now = 10_000 * step
            driver.submit(step, now=now)
            driver.finish(running.pop(0), now=now)
            placed = list(driver.schedule(now))
            if 99 in placed:
                return step
            running += placed
        return -1

    assert 0 < first_served() < 20
    assert first_served(aging=False) == -1


def test_a_label_that_arrives_later_changes_the_order() -> None:
    driver = one_at_a_time()
    driver.submit(1, now=0)
    driver.submit(2, now=1)
    driver.scheduler.set_objective(2, latency=True, group_id=-1, depth=0)
    driver.scheduler.set_objective(99, latency=True, group_id=-1, depth=0)
    assert drain(driver, 1) == [2, 1]


def test_a_call_with_a_target_yields_as_long_as_it_may_start_later() -> None:
    driver = one_at_a_time(aging_us=10_000)
    driver.submit(1, now=0)
    driver.submit(2, now=0, start_by_us=4_000)
    driver.submit(3, now=0, start_by_us=2_000, latency=True)
    driver.submit(4, now=0, start_by_us=50_000)
    driver.submit(5, now=1_000, latency=True)
    driver.submit(6, now=3_000, group=1)
    driver.submit(7, now=0, start_by_us=-5_000)
    assert drain(driver, 6_000) == [7, 5, 3, 6, 2, 1, 4]


def test_a_target_that_comes_later_changes_the_order_and_goes_again() -> None:
    driver = one_at_a_time(aging_us=10_000)
    driver.submit(1, now=0)
    driver.submit(2, now=1)
    driver.submit(3, now=2)
    driver.scheduler.set_objective(2, latency=False, group_id=-1, depth=0, start_by_us=500)
    driver.scheduler.set_objective(3, latency=False, group_id=-1, depth=0, start_by_us=100)
    driver.scheduler.set_objective(3, latency=False, group_id=-1, depth=0)
    assert drain(driver, 3) == [2, 1, 3]


# --- balance and fairness --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_engines", [4, 40])
@pytest.mark.parametrize("group", [-1, 0], ids=["calls", "a task group"])
def test_eight_throughput_calls_for_each_of_some_idle_engines_spread_evenly(
    num_engines: int, group: int
) -> None:
    calls = calls_per_engine(num_engines, 8 * num_engines, group=group)
    assert calls == dict.fromkeys(range(num_engines), 8)


def test_a_short_prefix_that_everybody_has_does_not_unbalance_engines() -> None:
    driver = Driver.with_engines([Cost()] * 4)
    for call_id in range(32):
        driver.submit(call_id, np.concatenate([text(0, 30), text(call_id, 200)]), boundaries=[30, 230])
    assert Counter(driver.engines_of().values()) == {0: 8, 1: 8, 2: 8, 3: 8}


def test_a_faster_engine_takes_more() -> None:
    driver = Driver.with_engines(
        [Cost(), Cost(base_us=16_000, per_sequence_us=160, per_prefill_token_us=100)]
    )
    for call_id in range(24):
        driver.submit(call_id)
    load = Counter(driver.engines_of().values())
    assert load[0] > 2 * load[1]


def test_a_flood_of_calls_that_share_a_prefix_does_not_starve_a_cold_one() -> None:
    aging_us = 50_000
    driver = Driver.with_engines([Cost(capacity_tokens=4_000, max_batch_size=8)], aging_us=aging_us)
    hot = text(1, 3_000)
    running: list[int] = []
    placed_us = -1
    for step in range(1, 400):
        now = 1_000 * step
        driver.submit(
            step, np.concatenate([hot, text(step, 50)]), boundaries=[3_000], arrival=0, now=now, app=1
        )
        if step == 20:
            driver.submit(9_999, text(77, 2_500), now=now)
        placed = driver.schedule(now)
        running += [call_id for call_id in placed if call_id != 9_999]
        if 9_999 in placed:
            placed_us = now
            break
        if len(running) >= 8 or not placed:
            driver.finish(running.pop(0), now=now, context=step, tokens=3_100)
    assert aging_us <= placed_us - 20_000 <= 7 * aging_us
