"""The cost model that follows the steps: changes of pace, drift, hiccups, and steps that say little."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine import live_cost
from parrot.engine.live_cost import HELD_OUT, LiveCost
from parrot.wire import CostModel, StepCost

START = CostModel(4000.0, 40.0, 25.0, 0.1, 64_000, 4_000)
Shape = tuple[int, int, int]
Steps = Iterator[Shape]


def scaled(cost: CostModel, factor: float) -> CostModel:
    fields = {name: getattr(cost, name) * factor for name in StepCost.__struct_fields__}
    return msgspec.structs.replace(cost, **fields)


def mixed(seed: int = 0) -> Steps:
    """Decodes of any batch, and of six steps one that also computes a part of a prompt."""
    rng = np.random.default_rng(seed)
    while True:
        batch = int(2 ** rng.uniform(0, 6))
        prefill = int(2 ** rng.uniform(3, 9)) if rng.random() < 1 / 6 else 0
        yield batch, prefill, batch * int(2 ** rng.uniform(5, 11)) + prefill


def small() -> Steps:
    """One or two calls that decode."""
    rng = np.random.default_rng(1)
    while True:
        batch = int(rng.integers(1, 3))
        yield batch, 0, batch * int(rng.integers(50, 150))


def live_with(
    steps: Steps,
    takes_us: Callable[[int, Shape], float],
    count: int,
    noise: float = 0.02,
    live: LiveCost | None = None,
) -> LiveCost:
    live = LiveCost(START) if live is None else live
    rng = np.random.default_rng(2)
    for number in range(count):
        shape = next(steps)
        live.observe(*shape, takes_us(number, shape) * float(rng.normal(1, noise)))
    return live


def worst(live: LiveCost, truth: CostModel, shapes: Steps, count: int = 100) -> float:
    """The largest relative error of a step."""
    picked = [next(shapes) for _ in range(count)]
    return max(abs(live.cost.step_us(*shape) / truth.step_us(*shape) - 1) for shape in picked)


@pytest.mark.parametrize("factor", [0.5, 1.5, 3.0])
@pytest.mark.parametrize("steps", [mixed, small])
def test_a_change_of_pace_is_taken_up_within_three_rounds_and_once(
    factor: float, steps: Callable[[], Steps]
) -> None:
    truth = scaled(START, factor)
    live = live_with(steps(), lambda _, shape: START.step_us(*shape), 500)
    assert live.changed is None
    live_with(steps(), lambda _, shape: truth.step_us(*shape), 3 * HELD_OUT, live=live)
    # Steps that were not seen, prompts among them, are held to have changed with those that were.
    assert worst(live, truth, mixed(7)) < 0.1
    changes = live.num_changes
    live_with(steps(), lambda _, shape: truth.step_us(*shape), 30 * HELD_OUT, live=live)
    assert live.num_changes <= changes + 1
    assert worst(live, truth, mixed(7)) < 0.1


@pytest.mark.parametrize("field", StepCost.__struct_fields__)
def test_one_part_that_was_measured_wrong_is_put_right(field: str) -> None:
    truth = msgspec.structs.replace(START, **{field: getattr(START, field) * 3})
    live = live_with(mixed(), lambda _, shape: truth.step_us(*shape), 20 * HELD_OUT)
    assert worst(live, truth, mixed(8)) < 0.15
    assert worst(LiveCost(START), truth, mixed(8)) > 0.3


def test_a_drift_is_followed() -> None:
    def takes_us(number: int, shape: Shape) -> float:
        return START.step_us(*shape) * (1 + number / 4000)

    live = live_with(mixed(), takes_us, 8000)
    assert worst(live, scaled(START, 3.0), mixed(9)) < 0.15
    assert live.num_changes < 60  # of 125 rounds


@pytest.mark.parametrize("hiccup", [50.0, 0.01])
def test_hiccups_change_nothing(hiccup: float) -> None:
    rng = np.random.default_rng(3)

    def takes_us(_: int, shape: Shape) -> float:
        return START.step_us(*shape) * (hiccup if rng.random() < 0.1 else 1)

    live = live_with(mixed(), takes_us, 60 * HELD_OUT)
    assert worst(live, START, mixed(10)) < 0.1
    assert live.num_changes <= 1


def test_hiccups_do_not_hide_what_a_part_costs() -> None:
    truth, rng = msgspec.structs.replace(START, per_prefill_token_us=75.0), np.random.default_rng(5)

    def takes_us(_: int, shape: Shape) -> float:
        return truth.step_us(*shape) * (30 if rng.random() < 0.1 else 1)

    live = live_with(mixed(), takes_us, 30 * HELD_OUT)
    assert worst(live, truth, mixed(13)) < 0.2


def test_steps_that_say_little_do_not_empty_the_parts_that_they_say_nothing_of() -> None:
    truth, prompt = msgspec.structs.replace(START, base_us=8000.0, per_sequence_us=400.0), (1, 512, 2048)
    live = live_with(small(), lambda _, shape: truth.step_us(*shape), 20 * HELD_OUT)
    assert worst(live, truth, small()) < 0.1
    assert START.step_us(*prompt) <= live.cost.step_us(*prompt) <= 2.5 * START.step_us(*prompt)


def test_noise_changes_nothing() -> None:
    live = live_with(mixed(), lambda _, shape: START.step_us(*shape), 60 * HELD_OUT, noise=0.1)
    assert worst(live, START, mixed(11)) < 0.12
    assert live.num_changes <= 2


def test_what_a_prompt_costs_is_not_forgotten_over_thousands_of_decodes() -> None:
    truth = msgspec.structs.replace(START, per_prefill_token_us=75.0)
    live = live_with(mixed(), lambda _, shape: truth.step_us(*shape), 20 * HELD_OUT)
    live_with(small(), lambda _, shape: truth.step_us(*shape), 3000, live=live)
    assert live.cost.step_us(1, 512, 512) == pytest.approx(truth.step_us(1, 512, 512), rel=0.15)


def test_steps_all_alike_leave_what_they_do_not_tell_in_proportion() -> None:
    live = live_with(iter(lambda: (1, 0, 100), None), lambda _, shape: 2 * START.step_us(*shape), 2000)
    assert worst(live, scaled(START, 2.0), mixed(12)) < 0.1


def test_memory_is_bounded_and_nonsense_is_ignored() -> None:
    live = LiveCost(START)
    rng = np.random.default_rng(4)
    for _ in range(6000):
        shape = [int(2 ** rng.uniform(0, power)) for power in (8, 14, 20)]
        live.observe(*shape, float(2 ** rng.uniform(0, 30)))
    assert len(live._cells) <= 64
    assert sum(len(cell.steps) for cell in live._cells.values()) <= 512
    before = live.cost
    for took_us in (0.0, -5.0, float("nan"), float("inf")):
        for _ in range(2 * HELD_OUT):
            assert not live.observe(1, 0, 10, took_us)
    assert not any(live.observe(0, 0, 0, 5.0) for _ in range(2 * HELD_OUT))
    assert live.cost is before


def test_what_the_cells_say_gives_way_where_the_start_is_nearer_to_the_newest_steps() -> None:
    """Steps were other than at the start, and the newest are as at the start again: the fit to all cells, at
    whatever pace, is some percent off for those, and the model of the start for nearly all cells."""
    parts = {"base_us": 1.1, "per_sequence_us": 3.0, "per_prefill_token_us": 4.0, "per_kv_token_us": 0.9}
    fields = {name: getattr(START, name) * factor for name, factor in parts.items()}
    truth = msgspec.structs.replace(START, **fields)
    live = live_with(mixed(), lambda _, shape: truth.step_us(*shape), 20 * HELD_OUT)
    cells, newest = live._known_cells(), [(1, 0, 100), (8, 0, 160_000)] * (HELD_OUT // 2)
    assert cells is not None
    judges = live_cost._Steps.of([(np.array([1.0, *shape]), START.step_us(*shape)) for shape in newest])
    start, now = live_cost.coefficients(START), live._now
    assert judges.error(now) > 0.03
    assert 0.25 * cells.error(start) > judges.error(now) + 0.25 * cells.error(now)  # by the score alone
    live_with(iter(newest), lambda _, shape: START.step_us(*shape), HELD_OUT, noise=0, live=live)
    assert judges.error(live._now) <= 0.01


NUMBERS = st.floats(0, 1e5)


@settings(max_examples=40, deadline=None)
@given(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), st.integers(0, 2**16), st.floats(0, 0.5))
def test_whatever_steps_take_the_costs_can_be_sent_and_are_no_worse_than_those_of_the_start(
    truth: tuple[float, float, float, float], seed: int, noise: float
) -> None:
    steps, rng, live = mixed(seed), np.random.default_rng(seed), LiveCost(START)
    start = live_cost.coefficients(START)
    for number in range(6):
        now = StepCost(*truth) if number % 3 else START
        newest = [next(steps) for _ in range(HELD_OUT)]
        takes_us = [max(1.0, now.step_us(*shape)) for shape in newest]
        times_us = [one * rng.uniform(1 - noise, 1 + noise) for one in takes_us]
        for shape, took_us in zip(newest, times_us, strict=True):
            live.observe(*shape, took_us)
        judges = live_cost._Steps.of(
            [(np.array([1.0, *shape]), took_us) for shape, took_us in zip(newest, times_us, strict=True)]
        )
        assert judges.error(live._now) <= judges.error(start) + 0.0101
        parts = live_cost.coefficients(live.cost)
        assert np.isfinite(parts).all()
        assert 0 <= parts.min() <= parts.max() <= 1e9
