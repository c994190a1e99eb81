"""The benchmark's own judgement: a check that could not fail would prove nothing."""

from __future__ import annotations

import math

import pytest
from bench import apps_cpu, splits
from bench.apps_cpu import RTT_S, Measured, Workload

from parrot.config import DEFAULT_MODEL
from parrot.models import resolve_model

WORKLOAD = Workload("chain", apps_cpu.chain_summary, num_chunks=8, num_steps=5, is_chain=True)


def judge(
    parrot_s: float, twin_s: float, idle: float = 0.001, gaps: tuple[float, ...] = ()
) -> dict[str, bool]:
    measured = Measured([parrot_s], [twin_s], [idle], texts_compared=8, gaps=list(gaps))
    checks: dict[str, bool] = apps_cpu._judge(WORKLOAD, measured)["checks"]
    return checks


def test_parrot_has_to_save_the_round_trips_between_steps() -> None:
    bound_s = 10.0 - 4 * RTT_S + 0.5
    assert judge(bound_s - 0.001, 10.0)["makespan"]
    assert not judge(bound_s + 0.001, 10.0)["makespan"]


def test_an_engine_that_idles_fails() -> None:
    assert judge(5, 10, idle=0.0099)["idle"]
    assert not judge(5, 10, idle=0.0101)["idle"]


def test_texts_may_part_only_at_a_near_tie() -> None:
    assert judge(5, 10)["texts"]
    assert judge(5, 10, gaps=(9e-4,))["texts"]
    assert not judge(5, 10, gaps=(9e-4, 2e-3))["texts"]


@pytest.mark.model
def test_the_gap_is_taken_where_the_texts_part() -> None:
    directory = resolve_model(DEFAULT_MODEL)
    messages = [("user", "What is the capital of France?")]
    greedy = "The capital of France is Paris."
    gap = splits.top2_gap(directory, messages, greedy, "The capital of France is Lyon.", 12)
    assert 1.0 < gap < 100.0, "the model is sure of Paris"
    assert splits.top2_gap(directory, messages, greedy, greedy, 3) == math.inf
