"""The cost model: an exact non-negative fit, and a measurement that leaves the engine fit for work."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from engine_harness import Harness, load
from machine import slowness
from parrot.engine import cost_model
from parrot.engine.cost_model import StepShape, calibrate, fit
from parrot.wire import CostModel

SHAPES = [
    StepShape(batch, new_tokens, cached)
    for batch in (1, 4, 16)
    for new_tokens in (1, 64)
    for cached in (0, 100, 1000)
]
FEATURES = np.array([shape.features for shape in SHAPES])


def test_features_are_what_the_cost_model_multiplies() -> None:
    assert StepShape(batch=4, new_tokens=1, cached_tokens=99).features == (1, 4, 0, 400)
    assert StepShape(batch=2, new_tokens=64, cached_tokens=16).features == (1, 2, 128, 160)


def test_the_fit_finds_the_coefficients_that_made_the_times() -> None:
    true = np.array([20_000.0, 400.0, 1500.0, 2.5])
    assert fit(FEATURES, FEATURES @ true) == pytest.approx(true, rel=1e-6)


def test_the_fit_is_close_under_noise() -> None:
    true = np.array([20_000.0, 400.0, 1500.0, 2.5])
    noise = np.random.default_rng(0).normal(1, 0.05, len(FEATURES))
    predicted = FEATURES @ fit(FEATURES, FEATURES @ true * noise)
    assert predicted == pytest.approx(FEATURES @ true, rel=0.1)


def test_large_steps_are_measured_on_blocks_of_their_own(tiny_model: Path) -> None:
    def shapes(num_blocks: int, max_batch_size: int, max_batch_tokens: int) -> set[StepShape]:
        runner = Harness(*load(tiny_model), num_blocks=num_blocks).runner
        return set(cost_model._shapes(runner, max_batch_size, max_batch_tokens))

    assert {StepShape(40, 1, 511), StepShape(4, 1024, 0)} <= shapes(40 * 32, 40, 4096)
    assert StepShape(40, 1, 31 * 16 - 1) in shapes(40 * 32 - 1, 40, 4096)
    few = shapes(3, 40, 512)
    assert max(shape.batch for shape in few) == 32  # of a small shape
    assert all(shape.length <= 48 for shape in few)


def test_a_coefficient_that_would_be_negative_is_zero() -> None:
    times = FEATURES @ np.array([20_000.0, -300.0, 1500.0, 0.0])
    coefficients = fit(FEATURES, times)
    assert coefficients.min() >= 0
    assert coefficients[1] == 0


@pytest.mark.parametrize(("num_blocks", "max_batch_tokens"), [(200, 512), (2, 16)])
def test_calibration_keeps_its_budget_and_leaves_the_engine_right(
    tiny_model: Path, num_blocks: int, max_batch_tokens: int
) -> None:
    loaded = load(tiny_model)
    expected = Harness(*loaded).generate([5, 6, 7, 8], max_tokens=12).ids
    harness = Harness(*loaded, num_blocks=num_blocks)
    started = time.process_time()
    cost = calibrate(harness.runner, max_batch_size=8, max_batch_tokens=max_batch_tokens, budget_s=0.5)
    assert time.process_time() - started < 10 * slowness()
    assert (cost.num_blocks, cost.capacity_tokens) == (num_blocks, num_blocks * 16)
    coefficients = (cost.base_us, cost.per_sequence_us, cost.per_prefill_token_us, cost.per_kv_token_us)
    assert min(coefficients) >= 0
    assert max(coefficients) > 0
    assert harness.generate([5, 6, 7, 8], max_tokens=12).ids == expected


def test_a_log_has_the_costs_of_a_step_in_milliseconds_without_those_of_nothing() -> None:
    cost = CostModel(41_770.0, 0.0, 2_701.0, 0.00001, 1024, 64)
    assert str(cost) == "41.8 ms + 2.7 ms a prefill token"
    gpu = CostModel(5_100.0, 21.5, 22.71, 0.1234, 1024, 64)
    expected = "5.1 ms + 0.0215 ms a sequence + 0.0227 ms a prefill token + 0.123 ms for 1,000 KV tokens"
    assert str(gpu) == expected
    assert str(CostModel(1_234_567.0, 0.0, 0.0, 0.0, 1024, 64)) == "1,235 ms"
    assert str(CostModel(0.0, 0.0, 0.0, 0.0, 1024, 64)) == "next to nothing"
