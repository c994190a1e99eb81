"""Engines that are slower than they said, or take no more calls."""

from __future__ import annotations

import numpy as np
import pytest
from bench.placement.driver import Cost, Driver, text


def test_a_paused_engine_takes_nothing_and_what_it_has_goes_on() -> None:
    driver = Driver.with_engines([Cost(), Cost()])
    driver.submit(1)
    assert driver.engines_of() == {1: 0}
    driver.scheduler.set_paused(0, True)
    for call_id in range(2, 6):
        driver.submit(call_id)
    assert set(driver.engines_of().values()) == {1}
    driver.finish(1)
    driver.scheduler.set_paused(0, False)
    driver.submit(6)
    assert driver.engines_of() == {6: 0}


def test_calls_wait_while_every_engine_is_paused_and_go_when_one_is_not() -> None:
    driver = Driver.with_engines([Cost()])
    driver.scheduler.set_paused(0, True)
    driver.submit(1)
    assert driver.schedule() == {}
    assert driver.schedule(now=60_000_000) == {}
    driver.scheduler.set_paused(0, False)
    assert driver.engines_of(now=61_000_000) == {1: 0}


def test_a_prefix_does_not_draw_a_call_to_a_paused_engine() -> None:
    driver = Driver.with_engines([Cost(), Cost()])
    prompt = text(1, 6000)
    driver.submit(1, prompt)
    driver.schedule()
    driver.finish(1, context=11, tokens=6050)
    driver.scheduler.set_paused(0, True)
    driver.submit(2, prompt)
    assert driver.engines_of() == {2: 1}


@pytest.mark.parametrize("full_scan", [False, True])
def test_an_engine_that_is_held_and_then_paused_is_held_no_more(full_scan: bool) -> None:
    driver = Driver.with_engines(
        [Cost(capacity_tokens=1000), Cost(capacity_tokens=1000)], full_scan=full_scan
    )
    for call_id in (1, 2):
        driver.submit(call_id, text(call_id, 500), new=100)
    assert len(driver.schedule()) == 2
    driver.submit(3, text(3, 700), new=100)
    assert driver.schedule() == {}
    driver.submit(4, text(4, 50), new=10, now=1)
    driver.schedule(now=1)
    driver.schedule(now=20_000_000)  # the big call has waited too long: an engine is kept free for it
    assert driver.scheduler.counters()["holds"] == 1
    for engine_id in (0, 1):
        driver.scheduler.set_paused(engine_id, True)
    driver.scheduler.check_invariants()
    for call_id in (1, 2):
        driver.finish(call_id, now=21_000_000)
    assert driver.schedule(now=21_000_000) == {}
    driver.scheduler.set_paused(1, False)
    assert driver.engines_of(now=22_000_000)[3] == 1


def test_new_calls_avoid_an_engine_that_has_become_slow() -> None:
    driver = Driver.with_engines([Cost(), Cost()])
    driver.scheduler.set_slowdown(0, 20)
    for call_id in range(1, 9):
        driver.submit(call_id)
    placed = list(driver.engines_of().values())
    assert placed.count(1) >= 7
    driver.scheduler.set_slowdown(0, 1)
    for call_id in range(9, 17):
        driver.submit(call_id)
    assert list(driver.engines_of().values()).count(0) >= 5


def test_new_calls_follow_what_an_engine_has_measured_anew() -> None:
    driver = Driver.with_engines([Cost(), Cost()])
    driver.scheduler.set_slowdown(0, 20)
    driver.scheduler.set_cost(0, **Cost().of_steps())  # which no slowdown comes on top of
    driver.scheduler.set_cost(1, **Cost(base_us=160_000, per_prefill_token_us=500).of_steps())
    for call_id in range(1, 9):
        driver.submit(call_id)
    assert list(driver.engines_of().values()).count(0) >= 7
    driver.scheduler.check_invariants()


def test_a_cost_measured_anew_leaves_capacity_and_batch_as_they_were() -> None:
    driver = Driver.with_engines([Cost(capacity_tokens=500, max_batch_size=2)])
    driver.scheduler.set_cost(0, **Cost(base_us=1).of_steps())
    driver.submit(1, text(1, 600), new=10)
    for call_id in (2, 3, 4):
        driver.submit(call_id, text(call_id, 50), new=10)
    assert len(driver.schedule()) <= 2


def test_a_cost_out_of_range_and_of_an_unknown_engine_is_refused() -> None:
    driver = Driver.with_engines([Cost()])
    for field in Cost().of_steps():
        for value in (-1.0, float("nan"), float("inf"), 1e12):
            with pytest.raises(ValueError, match=field):
                driver.scheduler.set_cost(0, **{**Cost().of_steps(), field: value})
    with pytest.raises(KeyError):
        driver.scheduler.set_cost(7, **Cost().of_steps())


def test_a_slowdown_out_of_range_and_unknown_engines_are_refused() -> None:
    driver = Driver.with_engines([Cost()])
    for slowdown in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="slowdown"):
            driver.scheduler.set_slowdown(0, slowdown)
    with pytest.raises(KeyError):
        driver.scheduler.set_slowdown(7, 2.0)
    with pytest.raises(KeyError):
        driver.scheduler.set_paused(7, True)


def test_the_slowest_engines_there_can_be_are_compared_like_others() -> None:
    """Their load is counted, too: what does not fit an int64 is seen by the sanitizers."""
    driver = Driver.with_engines([Cost(1e9, 1e9, 1e9, 1e9), Cost(1e9, 1e9, 1e9, 1e9)])
    for engine_id in (0, 1):
        driver.scheduler.set_slowdown(engine_id, 1e4)
    for call_id in range(8):
        driver.submit(call_id)
    assert sorted(driver.engines_of().values()) == [0] * 4 + [1] * 4


def test_harm_does_not_depend_on_what_the_clock_says() -> None:
    harms = []
    for now in (0, 2**59):
        driver = Driver.with_engines([Cost()])
        for call_id in range(40):  # whose expected ends together are more than an int64 holds
            driver.submit(call_id, now=now)
        assert len(driver.schedule(now)) == 40
        (candidate,) = driver.scheduler.candidates(
            now_us=now, domain=0, latency=False, token_ids=text(99, 200),
            boundaries=np.array([200], np.int32), max_new_tokens=50,
        )  # fmt: skip
        harms.append(candidate.harm_us)
    assert harms[1] == pytest.approx(harms[0], rel=1e-3)
