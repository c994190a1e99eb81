"""Greedy, temperature and top-p sampling: distributions, seeds, ties, bad logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parrot.engine.sampling import Draw, check_sampling, choose_seed, sample
from parrot.errors import InvalidRequest
from parrot.wire import Sampling

GREEDY = Draw(temperature=0.0, top_p=1.0, seed=0, position=0)


def random_logits(rows: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def frequencies(logits: torch.Tensor, temperature: float, top_p: float, draws: int = 4000) -> np.ndarray:
    rows = logits.expand(draws, -1)
    ids = sample(rows, [Draw(temperature, top_p, seed=7, position=i) for i in range(draws)])
    return np.bincount(np.array(ids, dtype=np.int64), minlength=logits.shape[-1]) / draws


def test_greedy_takes_the_largest_and_on_a_tie_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [3.0, -1.0, 2.0, 3.0]])
    assert sample(logits, [GREEDY, GREEDY]) == [1, 0]


def test_a_temperature_close_to_zero_is_greedy() -> None:
    logits = random_logits(4) * 1e4
    cold = [Draw(temperature=1e-5, top_p=1.0, seed=i, position=0) for i in range(4)]
    assert sample(logits, cold) == sample(logits, [GREEDY] * 4)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_frequencies_follow_the_tempered_softmax(temperature: float) -> None:
    logits = random_logits(1, vocab=6)
    expected = torch.softmax(logits[0] / temperature, dim=0).numpy()
    assert np.abs(frequencies(logits, temperature, 1.0) - expected).max() < 0.03


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.3, 0.2]]))
    expected = np.array([0.0, 4 / 7, 3 / 7, 0.0])
    assert np.abs(frequencies(logits, 1.0, 0.65) - expected).max() < 0.03


def test_top_p_smaller_than_the_largest_probability_is_greedy() -> None:
    logits = random_logits(8)
    draws = [Draw(1.0, 1e-6, seed=i, position=i) for i in range(8)]
    assert sample(logits, draws) == sample(logits, [GREEDY] * 8)


def test_a_row_is_sampled_the_same_alone_and_in_a_mixed_batch() -> None:
    logits = random_logits(9, vocab=300)
    draws = [
        Draw(temperature=(0.0, 0.8, 1.3)[i % 3], top_p=1.0 if i < 5 else 0.9, seed=i, position=10 + i)
        for i in range(9)
    ]
    alone = [sample(logits[i : i + 1], [draws[i]])[0] for i in range(9)]
    assert sample(logits, draws) == alone


def test_seed_and_position_both_change_the_draw() -> None:
    logits = torch.zeros(1, 10_000)
    ids = {
        sample(logits, [Draw(1.0, 1.0, seed=seed, position=position)])[0]
        for seed in (1, 2, 2**64 - 1)
        for position in (0, 1)
    }
    assert len(ids) == 6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_none_and_spares_the_others(bad: float) -> None:
    logits = random_logits(3)
    expected = sample(logits, [GREEDY, Draw(1.0, 0.9, 3, 0), GREEDY])
    logits[0, 4] = bad
    assert sample(logits, [GREEDY, Draw(1.0, 0.9, 3, 0), GREEDY]) == [None, *expected[1:]]


def test_a_request_without_a_seed_gets_a_fresh_one() -> None:
    assert choose_seed(Sampling()) != choose_seed(Sampling())
    assert choose_seed(Sampling(seed=-1)) == 2**64 - 1


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(max_tokens=0), "max_tokens"),
        (Sampling(temperature=-0.1), "temperature"),
        (Sampling(temperature=float("nan")), "temperature"),
        (Sampling(top_p=0.0), "top_p"),
        (Sampling(top_p=1.1), "top_p"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(sampling: Sampling, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(sampling)
    assert caught.value.param == param
