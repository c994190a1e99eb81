"""Placement by objectives: what latency-bound calls do to their engine, and how much an engine is given."""

from __future__ import annotations

import numpy as np
from bench.placement.driver import Cost, Driver, text
from bench.placement.small_cases import latency_call_beside_throughput_work


def test_one_engine_takes_sixteen_calls_at_once_and_then_the_reader_of_their_results() -> None:
    driver = Driver.with_engines([Cost(capacity_tokens=8_192)])
    for call_id in range(16):
        driver.submit(call_id, text(call_id, 237), app=1, arrival=0, group=0, depth=1, new=25)
    assert len(driver.schedule()) == 16
    driver.submit(16, text(99, 500), app=1, arrival=0, latency=True, new=64)
    assert list(driver.schedule()) == [16]
    assert driver.scheduler.counters()["deferred"] == 0


def test_latency_bound_strangers_share_an_engine_up_to_its_bound() -> None:
    driver = Driver.with_engines([Cost(max_batch_size=16)])
    for call_id in range(20):
        driver.submit(call_id, text(call_id, 250), latency=True)
    assert list(driver.schedule()) == list(range(16))
    driver = Driver.with_engines([Cost()], latency_capacity_tokens=3_000)
    for call_id in range(20):
        driver.submit(call_id, text(call_id, 250), latency=True)
    assert list(driver.schedule()) == list(range(10))


def test_throughput_work_beside_a_latency_bound_call_stays_within_the_bound() -> None:
    driver = Driver.with_engines([Cost()], latency_capacity_tokens=2_000)
    driver.submit(0, text(0, 450), latency=True)
    for call_id in range(1, 10):
        driver.submit(call_id, text(call_id, 450))
    assert list(driver.schedule()) == [0, 1, 2, 3]
    driver.finish(0)
    assert list(driver.schedule()) == [4, 5, 6, 7, 8, 9]


def test_a_latency_bound_call_goes_to_the_engine_that_is_constrained_already() -> None:
    assert latency_call_beside_throughput_work() == ((32, 64_000), 0)


def test_the_room_that_a_latency_bound_call_takes_from_others_counts_although_batching_is_free() -> None:
    slower = Cost(base_us=8_800, per_sequence_us=0, per_kv_token_us=0, per_prefill_token_us=1)
    faster = Cost(base_us=8_000, per_sequence_us=0, per_kv_token_us=0, per_prefill_token_us=1)
    for num_residents, expected in ((1, 1), (31, 0)):
        driver = Driver.with_engines([slower], latency_capacity_tokens=2_000)
        driver.submit(100, text(100, 450), latency=True)
        assert driver.engines_of() == {100: 0}
        driver.add_engine(1, faster)
        for call_id in range(num_residents):
            driver.submit(call_id, text(call_id, 1_950))
        assert set(driver.engines_of().values()) == {1}
        later = 1_000_000  # every prompt is computed by then
        driver.submit(101, text(101, 450), latency=True, now=later)
        assert driver.engines_of(later) == {101: expected}


def test_a_first_latency_bound_call_of_any_size_may_join_throughput_work() -> None:
    driver = Driver.with_engines([Cost()], latency_capacity_tokens=2_000)
    driver.submit(1)
    driver.schedule()
    driver.submit(2, text(2, 5_000), latency=True)
    driver.submit(3, text(3, 100), latency=True)
    assert list(driver.schedule()) == [2]


def test_a_latency_bound_call_that_is_forced_upon_work_stops_more_from_coming() -> None:
    driver = Driver.with_engines([Cost(max_batch_size=256)], latency_capacity_tokens=2_000)
    for call_id in range(31):
        driver.submit(call_id, text(call_id, 1_950))
    driver.schedule()
    assert driver.load(0) == (31, 62_000)
    driver.submit(100, text(100, 450), latency=True)
    assert list(driver.schedule()) == [100]
    driver.submit(200, text(200, 450))
    for call_id in range(30):
        assert driver.schedule() == {}
        driver.finish(call_id)
    assert driver.load(0) == (2, 2_500)
    assert driver.schedule() == {}
    driver.finish(30)
    assert list(driver.schedule()) == [200]


def test_a_label_on_a_running_call_constrains_its_engine() -> None:
    driver = Driver.with_engines([Cost()], latency_capacity_tokens=1_000)
    driver.submit(1, text(1, 450))
    driver.submit(2, text(2, 450))
    driver.schedule()
    driver.scheduler.set_objective(1, latency=True, group_id=-1, depth=0)
    driver.scheduler.check_invariants()
    driver.submit(3, text(3, 450))
    assert driver.schedule() == {}
    driver.scheduler.set_objective(1, latency=False, group_id=-1, depth=0)
    assert list(driver.schedule()) == [3]


def admitted_beside(per_token_us: float, *, plain: bool = False, **cost: float) -> int:
    """How many throughput calls an engine takes beside a latency-bound one; each has 500 tokens."""
    driver = Driver.with_engines([Cost(**cost)], latency_capacity_tokens=3_000)  # type: ignore[arg-type]
    driver.submit(100, text(100, 450), latency=True, per_token_us=per_token_us)
    if plain:
        driver.submit(101, text(101, 450), latency=True)
    driver.schedule()
    for call_id in range(60):
        driver.submit(call_id, text(call_id, 450))
        driver.schedule()
    return driver.load(0)[0] - 1 - plain


def test_the_target_of_a_latency_bound_call_bounds_its_engine() -> None:
    # step_us = 8000 + 40 * batch + 0.1 * tokens
    assert admitted_beside(0) == 5, "no target: 3,000 tokens"
    assert admitted_beside(8_290) == 2, "3 calls of 500 tokens take 8,270"
    assert admitted_beside(9_000) == 10, "more than without a target: 11 calls take 8,990"
    assert admitted_beside(1e6) == 60
    assert admitted_beside(9_000, plain=True) == 4, "beside one without a target its bound holds too"
    assert admitted_beside(8_095) == 0, "it could hardly be kept alone"
    assert admitted_beside(5_000) == 5, "a target that cannot be kept is none"
    assert admitted_beside(8_050, per_kv_token_us=0.0) == 0
    assert admitted_beside(11_000, per_kv_token_us=0.0, max_batch_size=256) == 60


def test_a_target_holds_from_its_label_until_its_call_has_left() -> None:
    driver = Driver.with_engines([Cost()], latency_capacity_tokens=3_000)
    for call_id in range(2):
        driver.submit(call_id, text(call_id, 450))
    driver.schedule()
    driver.scheduler.set_objective(0, latency=True, group_id=-1, depth=0, per_token_us=8_200)
    driver.scheduler.check_invariants()
    driver.submit(3, text(3, 450))
    assert driver.schedule() == {}
    driver.scheduler.set_objective(0, latency=True, group_id=-1, depth=0, per_token_us=9_000)
    assert list(driver.schedule()) == [3]
    driver.scheduler.set_objective(0, latency=True, group_id=-1, depth=0, per_token_us=8_200)
    driver.submit(4, text(4, 450))
    assert driver.schedule() == {}
    driver.finish(0)
    assert list(driver.schedule()) == [4]


def test_without_objective_awareness_an_engine_fills_to_its_capacity() -> None:
    driver = Driver.with_engines(
        [Cost(capacity_tokens=2_500)], latency_capacity_tokens=600, objective_aware=False
    )
    for call_id in range(8):
        driver.submit(call_id, text(call_id, 450), latency=call_id == 0)
    assert list(driver.schedule()) == [0, 1, 2, 3, 4]


def test_an_empty_engine_takes_a_call_of_any_size_and_nothing_beside_it() -> None:
    driver = Driver.with_engines([Cost(capacity_tokens=1_000)])
    driver.submit(1, text(1, 5_000), latency=True)
    driver.submit(2)
    assert list(driver.schedule()) == [1]
    driver.finish(1)
    assert list(driver.schedule()) == [2]


def test_shared_tokens_count_once_towards_the_capacity() -> None:
    driver = Driver.with_engines([Cost(capacity_tokens=2_000)])
    for call_id in range(20):
        prompt = np.concatenate([text(1, 1_000), text(10 + call_id, 50)])
        driver.submit(call_id, prompt, boundaries=[1_000, 1_050])
    assert len(driver.schedule()) == 10
    assert driver.load(0) == (10, 2_000)
    driver.finish(0)
    assert driver.load(0) == (9, 1_900)
    for call_id in range(1, 10):
        driver.finish(call_id)
    assert driver.load(0) == (0, 0)


def test_one_latency_bound_call_and_eight_others_do_not_share_an_engine() -> None:
    driver = Driver.with_engines([Cost()] * 2)
    for call_id in range(8):
        driver.submit(call_id)
    driver.submit(8, latency=True)
    engines = driver.engines_of()
    assert engines[8] not in {engines[call_id] for call_id in range(8)}
    later = Driver.with_engines([Cost()])
    for call_id in range(8):
        later.submit(call_id)
    assert later.engines_of() == dict.fromkeys(range(8), 0)
    later.add_engine(1, Cost())
    later.submit(8, latency=True)
    assert later.engines_of() == {8: 1}
