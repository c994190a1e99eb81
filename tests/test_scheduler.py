"""Scheduler: events, what they leave behind, explanations and bad input."""

from __future__ import annotations

import numpy as np
import pytest
from bench.placement.driver import KEY, Cost, Driver, text

from parrot._core import Scheduler

# --- events ----------------------------------------------------------------------------------------------


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


def test_a_prefix_that_was_filled_ahead_draws_the_calls_that_begin_with_it() -> None:
    driver = Driver.with_engines([Cost(), Cost(), Cost()])
    prefix, boundaries = text(1, 1_000), np.array([500, 1_000], dtype=np.int32)
    driver.scheduler.add_context(2, 7, domain=0, token_ids=prefix, boundaries=boundaries)
    driver.scheduler.check_invariants()
    prompt = np.concatenate([prefix, text(2, 50)])
    driver.submit(1, prompt, boundaries=[500, 1_000, 1_050])
    driver.submit(2, prompt, boundaries=[500, 1_000, 1_050], domain=1)
    placed = driver.schedule()
    assert (placed[1].engine_id, placed[1].prefix_len, placed[1].parent_context_id) == (2, 1_000, 7)
    assert (placed[2].engine_id, placed[2].prefix_len) == (0, 0)
    driver.scheduler.cancel(1)
    driver.scheduler.forget_context(2, 7, 600)
    driver.submit(3, prompt, boundaries=[500, 1_000, 1_050])
    assert driver.schedule()[3].prefix_len == 500
    driver.scheduler.cancel(3)
    driver.scheduler.forget_context(2, 7, 0)
    driver.submit(4, prompt, boundaries=[500, 1_000, 1_050])
    assert driver.schedule()[4].prefix_len == 0


def test_candidates_are_those_that_a_call_would_have_and_leave_nothing_behind() -> None:
    driver = Driver.with_engines([Cost(), Cost(), Cost()])
    prefix, boundaries = text(1, 1_000), np.array([500, 1_000], dtype=np.int32)
    ask = {"domain": 0, "latency": False, "token_ids": prefix, "boundaries": boundaries, "now_us": 0}
    driver.submit(1)
    driver.schedule()
    assert [c.engine_id for c in driver.scheduler.candidates(max_new_tokens=50, **ask)] == [1, 2, 0]
    driver.scheduler.add_context(2, 7, domain=0, token_ids=prefix, boundaries=boundaries[:1])
    best = driver.scheduler.candidates(max_new_tokens=50, **ask)[0]
    driver.submit(2, prefix, boundaries=boundaries)
    expected = driver.scheduler.explain(2)[0]
    assert (best.engine_id, best.prefix_len) == (expected.engine_id, expected.prefix_len) == (2, 500)
    assert best.score_us == expected.score_us
    driver.scheduler.cancel(1)
    driver.scheduler.cancel(2)
    driver.scheduler.forget_context(2, 7, 0)
    driver.scheduler.check_invariants()  # no prefix is left without a holder
    assert Driver.with_engines([]).scheduler.candidates(max_new_tokens=50, **ask) == []


def test_a_call_placed_away_from_its_prefix_is_counted_as_a_replication() -> None:
    for affinity in (True, False):
        driver = Driver.with_engines([Cost(max_batch_size=1), Cost()], prefix_affinity=affinity)
        for call_id in (1, 2):
            driver.submit(call_id, text(1, 2_000))
            driver.schedule()
        counters = driver.scheduler.counters()
        assert counters["placed"] == 2
        assert counters["replications"] == int(affinity)


# --- bad input -------------------------------------------------------------------------------------------


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
    no_ids = np.zeros(0, dtype=np.int32)
    with pytest.raises(KeyError, match="engine_id = 9 is unknown"):
        scheduler.add_context(9, 1, domain=0, token_ids=no_ids, boundaries=no_ids)


def test_contexts_filled_ahead_are_checked() -> None:
    scheduler = Driver.with_engines([Cost()]).scheduler
    ids = text(1, 20)

    def add(context_id: int, *boundaries: int) -> None:
        cuts = np.array(boundaries, dtype=np.int32)
        scheduler.add_context(0, context_id, domain=0, token_ids=ids, boundaries=cuts)

    with pytest.raises(ValueError, match="context_id = 0"):
        add(0, 20)
    with pytest.raises(ValueError, match=r"boundaries\[0\] = 21"):
        add(1, 21)
    add(1, 20)
    with pytest.raises(ValueError, match="context_id = 1 is there already"):
        add(1, 20)
    scheduler.check_invariants()


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
