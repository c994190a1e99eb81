"""Scheduler: order, Algorithm 1, admission, events and what they leave behind."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from parrot._core import Scheduler
from scheduler_harness import KEY, Cost, Driver, text

SLOW_PREFILL = Cost(per_prefill_token_us=500.0)


# --- order -------------------------------------------------------------------------------------------------


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


def test_a_label_that_arrives_later_changes_the_order() -> None:
    driver = one_at_a_time()
    driver.submit(1, now=0)
    driver.submit(2, now=1)
    driver.scheduler.set_objective(2, latency=True, group_id=-1, depth=0)
    driver.scheduler.set_objective(99, latency=True, group_id=-1, depth=0)
    assert drain(driver, 1) == [2, 1]


# --- task groups -------------------------------------------------------------------------------------------


def test_a_group_with_a_long_prefix_is_placed_together() -> None:
    driver = Driver.with_engines([SLOW_PREFILL] * 3)
    driver.submit(99)
    assert driver.engines_of() == {99: 0}
    prefix = text(1, 7_000)
    driver.submit(98, prefix, new=1)
    assert driver.engines_of() == {98: 1}
    driver.finish(98, context=5, tokens=7_001)
    for call_id in range(8):
        prompt = np.concatenate([prefix, text(10 + call_id, 20)])
        driver.submit(call_id, prompt, boundaries=[7_000, 7_020], app=1, group=3)
    placed = driver.schedule()
    assert {placement.engine_id for placement in placed.values()} == {1}
    assert {placement.reason for placement in placed.values()} == {"group"}
    assert placed[0].prefix_len == 7_000
    assert placed[0].parent_context_id == 5
    assert driver.load(1) == (8, 7_000 + 8 * 70)
    assert driver.scheduler.counters()["splits"] == 0


def test_a_group_without_a_common_prefix_is_split_when_it_finishes_sooner() -> None:
    driver = Driver.with_engines([Cost()] * 4)
    for call_id in range(16):
        driver.submit(call_id, app=1, group=0)
    assert Counter(driver.engines_of().values()) == {0: 4, 1: 4, 2: 4, 3: 4}
    counters = driver.scheduler.counters()
    assert counters["placed_group"] == 16
    assert counters["splits"] == 1


def test_a_group_that_fits_no_engine_is_split_and_the_rest_waits() -> None:
    driver = Driver.with_engines([Cost(max_batch_size=3), Cost(max_batch_size=2)])
    for call_id in range(8):
        driver.submit(call_id, app=1, group=0)
    assert Counter(driver.engines_of().values()) == {0: 3, 1: 2}
    assert driver.scheduler.num_queued == 3
    assert driver.scheduler.counters()["deferred"] == 3
    driver.finish(0)
    assert list(driver.schedule()) == [5]


def test_groups_of_two_applications_with_one_number_are_two_groups() -> None:
    driver = Driver.with_engines([SLOW_PREFILL] * 2)
    prefixes = {1: text(1, 4_000), 2: text(2, 4_000)}
    for call_id in range(8):
        app = 1 + call_id % 2
        prompt = np.concatenate([prefixes[app], text(10 + call_id, 10)])
        driver.submit(call_id, prompt, boundaries=[4_000], app=app, arrival=0, group=0)
    engines = driver.engines_of()
    assert {engines[call_id] for call_id in (0, 2, 4, 6)} != {engines[call_id] for call_id in (1, 3, 5, 7)}
    assert driver.load(0)[1] + driver.load(1)[1] == 2 * 4_000 + 8 * 60


def test_without_group_placement_members_are_placed_one_by_one() -> None:
    driver = Driver.with_engines([Cost()] * 2, group_placement=False)
    for call_id in range(4):
        driver.submit(call_id, app=1, group=0)
    assert {placement.reason for placement in driver.schedule().values()} == {"alone"}


# --- shared prefixes ---------------------------------------------------------------------------------------


def test_queued_calls_that_share_a_long_prefix_go_together() -> None:
    driver = Driver.with_engines([Cost(per_kv_token_us=3.0)] * 4)
    for engine_id in range(4):
        driver.submit(100 + engine_id, text(900 + engine_id, 3_000))
    assert set(driver.engines_of().values()) == {0, 1, 2, 3}
    prefix = text(1, 6_000)
    for call_id in range(4):
        prompt = np.concatenate([prefix, text(10 + call_id, 10)])
        driver.submit(call_id, prompt, boundaries=[6_000, 6_010])
    placed = driver.schedule()
    assert len({placement.engine_id for placement in placed.values()}) == 1
    assert {placement.reason for placement in placed.values()} == {"sharers"}


def test_a_call_goes_where_a_finished_context_has_its_prefix() -> None:
    driver = Driver.with_engines([Cost()] * 3)
    prefix = text(1, 2_000)
    driver.submit(1, text(2, 500))
    driver.submit(2, prefix)
    engines = driver.engines_of()
    driver.finish(1)
    driver.finish(2, context=7, tokens=2_050)
    driver.submit(3, np.concatenate([prefix, text(3, 30)]), boundaries=[2_000, 2_030])
    placement = driver.schedule()[3]
    assert placement.engine_id == engines[2] == 1
    assert (placement.parent_context_id, placement.prefix_len, placement.reason) == (7, 2_000, "prefix")


def test_a_call_goes_where_a_prompt_in_flight_has_its_prefix() -> None:
    driver = Driver.with_engines([Cost()] * 3)
    driver.submit(1)
    driver.submit(2, text(1, 2_000))
    assert driver.engines_of(0) == {1: 0, 2: 1}
    driver.submit(3, np.concatenate([text(1, 2_000), text(3, 30)]), boundaries=[2_000, 2_030], now=100_000)
    placement = driver.schedule(100_000)[3]
    assert (placement.engine_id, placement.parent_context_id, placement.prefix_len) == (1, 0, 2_000)


def test_the_newest_context_is_the_parent_and_evictions_are_followed() -> None:
    driver = Driver.with_engines([Cost()])
    prefix = text(1, 400)
    for call_id in (1, 2):
        driver.submit(call_id, prefix, boundaries=[100, 400])
        driver.schedule()
        driver.finish(call_id, context=10 + call_id, tokens=450)

    def parent_of(call_id: int) -> tuple[int, int]:
        driver.submit(call_id, np.concatenate([prefix, text(call_id, 9)]), boundaries=[100, 400, 409])
        placement = driver.schedule()[call_id]
        driver.finish(call_id)
        return placement.parent_context_id, placement.prefix_len

    assert parent_of(3) == (12, 400)
    driver.scheduler.forget_context(0, 12, 399)
    assert parent_of(4) == (11, 400)
    driver.scheduler.forget_context(0, 11, 0)
    assert parent_of(5) == (12, 100)
    driver.scheduler.forget_context(0, 12, 50)
    assert parent_of(6) == (0, 0)
    driver.scheduler.forget_context(0, 12, 0)
    driver.scheduler.check_invariants()


def test_a_context_holds_no_more_than_its_tokens() -> None:
    driver = Driver.with_engines([Cost()])
    driver.submit(1, text(1, 400), boundaries=[100, 300, 400])
    driver.schedule()
    driver.finish(1, context=1, tokens=350)
    driver.submit(2, text(1, 400), boundaries=[100, 300, 400])
    assert driver.schedule()[2].prefix_len == 300


def test_domains_share_nothing() -> None:
    driver = Driver.with_engines([Cost()])
    driver.submit(1, text(1, 400), domain=1)
    driver.submit(2, text(1, 400), domain=2)
    assert {placement.prefix_len for placement in driver.schedule().values()} == {0}
    assert driver.load(0) == (2, 900)
    driver.finish(1, context=1, tokens=450)
    driver.submit(3, text(1, 400), domain=3)
    assert driver.schedule()[3].prefix_len == 0


def test_without_prefix_affinity_a_prefix_does_not_draw_calls() -> None:
    driver = Driver.with_engines([Cost()] * 2, prefix_affinity=False)
    driver.submit(1, text(1, 2_000))
    driver.submit(2)
    assert driver.engines_of() == {1: 0, 2: 1}
    driver.finish(2)
    driver.submit(3, text(1, 2_000))
    placement = driver.schedule()[3]
    assert (placement.engine_id, placement.prefix_len, placement.reason) == (1, 0, "alone")


def test_with_every_hash_equal_placements_stay_the_same() -> None:
    def placements(constant_hash: bool) -> list[tuple[int, int, int, int, str]]:
        driver = Driver.with_engines([Cost()] * 3, constant_hash=constant_hash)
        result = []
        for call_id in range(60):
            prompt = np.concatenate([text(call_id % 5, 300), text(100 + call_id, 40)])
            driver.submit(call_id, prompt, boundaries=[128, 300, 340], now=call_id)
            for placed in driver.schedule(call_id).values():
                result.append(
                    (
                        placed.call_id,
                        placed.engine_id,
                        placed.parent_context_id,
                        placed.prefix_len,
                        placed.reason,
                    )
                )
            if call_id % 3 == 2:
                driver.finish(call_id - 2, context=call_id + 1, tokens=390)
        return result

    assert placements(True) == placements(False)


# --- objectives and admission ------------------------------------------------------------------------------


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
    """The paper's example: 64,000 tokens of throughput work would have to make room down to 2,000."""
    driver = Driver.with_engines([Cost(), Cost()], latency_capacity_tokens=2_000)
    driver.submit(100, text(100, 950), latency=True)
    assert driver.engines_of() == {100: 0}
    for call_id in range(32):
        driver.submit(call_id, text(call_id, 1_950))
    assert set(driver.engines_of().values()) == {1}
    assert driver.load(1) == (32, 64_000)
    driver.finish(31)
    driver.submit(101, text(101, 450), latency=True)
    assert driver.engines_of() == {101: 0}


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


# --- balance and fairness ----------------------------------------------------------------------------------


def test_32_throughput_calls_spread_evenly_over_4_idle_engines() -> None:
    driver = Driver.with_engines([Cost()] * 4)
    for call_id in range(32):
        driver.submit(call_id)
    assert Counter(driver.engines_of().values()) == {0: 8, 1: 8, 2: 8, 3: 8}


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


# --- events ------------------------------------------------------------------------------------------------


def test_a_lost_engine_gives_its_calls_back_and_its_contexts_are_forgotten() -> None:
    driver = Driver.with_engines([Cost()])
    driver.submit(1, text(1, 2_000))
    driver.schedule()
    driver.finish(1, context=1, tokens=2_050)
    for call_id in (4, 3, 2):
        driver.submit(call_id)
    driver.schedule()
    assert driver.scheduler.remove_engine(0) == [2, 3, 4]
    driver.scheduler.check_invariants()
    assert (driver.scheduler.num_in_flight, driver.scheduler.num_queued) == (0, 0)
    driver.submit(2)
    assert driver.schedule() == {}
    driver.add_engine(0, Cost())
    driver.submit(5, text(1, 2_000))
    assert driver.schedule()[5].prefix_len == 0


def test_cancel_takes_a_call_from_the_queue_or_its_engine() -> None:
    driver = Driver.with_engines([Cost(max_batch_size=1)])
    driver.submit(1)
    driver.submit(2)
    driver.submit(3)
    assert list(driver.schedule()) == [1]
    assert driver.scheduler.cancel(1)
    assert driver.scheduler.cancel(2)
    assert not driver.scheduler.cancel(2)
    assert driver.load(0) == (0, 0)
    assert list(driver.schedule()) == [3]
    driver.submit(1)
    assert driver.scheduler.num_queued == 1


def test_the_same_events_give_the_same_placements() -> None:
    def run() -> list[tuple[int, int, float]]:
        driver = Driver.with_engines([Cost(max_batch_size=6)] * 5)
        placed: list[tuple[int, int, float]] = []
        running: list[int] = []
        for call_id in range(200):
            prompt = np.concatenate([text(call_id % 7, 256), text(call_id, 30)])
            latency = call_id % 11 == 0
            group = call_id // 20 if call_id % 2 else -1
            driver.submit(call_id, prompt, boundaries=[256], now=call_id, app=1, latency=latency, group=group)
            for placement in driver.schedule(call_id).values():
                placed.append((placement.call_id, placement.engine_id, placement.score_us))
                running.append(placement.call_id)
            if call_id % 3 == 0 and running:
                driver.finish(running.pop(0), now=call_id, context=call_id + 1, tokens=256)
        return placed

    assert run() == run()


def test_explain_lists_the_engines_best_first_with_the_parts_of_their_score() -> None:
    driver = Driver.with_engines([Cost(max_batch_size=1), Cost(), Cost()])
    driver.submit(1, text(1, 500))
    placement = driver.schedule()[1]
    driver.submit(2, text(2, 600))
    queued = driver.scheduler.explain(2)
    assert [(candidate.engine_id, candidate.admissible) for candidate in queued] == [
        (1, True),
        (2, True),
        (0, False),
    ]
    driver.schedule()
    decided = driver.scheduler.explain(1)
    assert [candidate.engine_id for candidate in decided] == [0, 1, 2]
    assert decided[0].score_us == placement.score_us
    for candidate in queued + decided:
        parts = (candidate.queue_us, candidate.prefill_us, candidate.decode_us, candidate.harm_us)
        assert candidate.score_us == pytest.approx(sum(parts))
    assert queued[-1].queue_us == pytest.approx(500 * 25)
    assert queued[-1].harm_us > 0
    assert decided[0].prefill_us == pytest.approx(8_000 + 40 + 500 * 25)
    assert decided[0].decode_us == pytest.approx(49 * (8_000 + 40 + 0.1 * 525))


# --- bad input ---------------------------------------------------------------------------------------------


def test_unknown_ids_are_key_errors() -> None:
    driver = Driver.with_engines([Cost()])
    scheduler = driver.scheduler
    with pytest.raises(KeyError, match="call_id = 5 is unknown"):
        scheduler.finish(5, now_us=0, context_id=0, num_tokens=0)
    with pytest.raises(KeyError, match="call_id = 5 is unknown"):
        scheduler.explain(5)
    for ask in (scheduler.remove_engine, scheduler.engine_load):
        with pytest.raises(KeyError, match="engine_id = 9 is unknown"):
            ask(9)
    with pytest.raises(KeyError, match="engine_id = 9 is unknown"):
        scheduler.forget_context(9, 1, 0)
    scheduler.forget_context(0, 1, 0)


def test_duplicates_and_a_finish_before_its_time_are_refused() -> None:
    driver = Driver.with_engines([Cost()])
    driver.submit(1)
    with pytest.raises(ValueError, match="call_id = 1 is there already"):
        driver.submit(1)
    with pytest.raises(ValueError, match="call_id = 1 is queued"):
        driver.finish(1)
    driver.schedule()
    with pytest.raises(ValueError, match="call_id = 1 is there already"):
        driver.submit(1)
    with pytest.raises(ValueError, match="engine_id = 0 is there already"):
        driver.add_engine(0, Cost())
    driver.scheduler.check_invariants()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base_us": -1.0}, "base_us = -1"),
        ({"per_sequence_us": float("nan")}, "per_sequence_us = nan"),
        ({"per_prefill_token_us": float("inf")}, "per_prefill_token_us = inf"),
        ({"per_kv_token_us": 1e12}, "per_kv_token_us = 1000000000000"),
        ({"capacity_tokens": 0}, "capacity_tokens = 0"),
        ({"max_batch_size": 0}, "max_batch_size = 0"),
    ],
)
def test_engines_with_impossible_numbers_are_refused(changed: dict[str, float], message: str) -> None:
    scheduler = Scheduler(hash_key=KEY)
    with pytest.raises(ValueError, match=message):
        scheduler.add_engine(1, **{**vars(Cost()), **changed})  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        scheduler.engine_load(1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"call_id": -1}, "call_id = -1"),
        ({"now": -1}, "_us = -1"),
        ({"depth": -1}, "depth = -1"),
        ({"new": -1}, "max_new_tokens = -1"),
        ({"boundaries": [3, 2]}, r"boundaries\[1\] = 2"),
        ({"boundaries": [201]}, r"boundaries\[0\] = 201"),
        ({"prompt": np.zeros(3, dtype=np.int64)}, "token_ids has type int64"),
        ({"prompt": np.array([-7], dtype=np.int32)}, r"token_ids\[0\] = -7"),
    ],
)
def test_calls_with_impossible_numbers_are_refused(changed: dict[str, object], message: str) -> None:
    driver = Driver.with_engines([Cost()])
    with pytest.raises(ValueError, match=message):
        driver.submit(**{"call_id": 1, **changed})  # type: ignore[arg-type]
    driver.scheduler.check_invariants()
    assert driver.scheduler.num_queued == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hash_key": b"short"}, "hash_key has 5 bytes"),
        ({"aging_us": 0}, "aging_us = 0"),
        ({"latency_capacity_tokens": 0}, "latency_capacity_tokens = 0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(**{"hash_key": KEY, **options})  # type: ignore[arg-type]


def test_a_call_without_tokens_or_output_is_legal() -> None:
    driver = Driver.with_engines([Cost()])
    driver.submit(1, np.zeros(0, dtype=np.int32), boundaries=[], new=0)
    assert list(driver.schedule()) == [1]
    assert driver.load(0) == (1, 0)
    driver.finish(1, context=3)
