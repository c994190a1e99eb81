"""Sampling against a slow reference; distributions, seeds, ties, bad logits, parameters out of range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine import truncation
from parrot.engine.sampling import OutputState, Sampler, check_sampling
from parrot.errors import InvalidRequest
from parrot.wire import Sampling
from sampling_reference import draw, probabilities, shaped_logits

GREEDY = Sampling(seed=0)
END_IDS = frozenset({1, 4})
# 0.1 % of fair samplers exceed these values of chi-square, by degrees of freedom.
CHI_SQUARE_LIMIT = {3: 16.27, 5: 20.52, 7: 24.32}


def state_of(
    sampling: Sampling, context: Sequence[int] = (), *, start: int | None = None, constrained: bool = False
) -> OutputState:
    ids = np.array(context, dtype=np.int32)
    return OutputState(sampling, len(ids) if start is None else start, ids, END_IDS, constrained=constrained)


def sample(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int] | None = None
) -> list[int | None]:
    """One step of outputs that begin here."""
    places = positions or [0] * len(samplings)
    states = [state_of(sampling, start=0) for sampling in samplings]
    return Sampler().sample(logits, states, places)


def random_logits(rows: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 40]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.8]),
    logit_bias=st.lists(st.tuples(st.integers(0, 22), st.floats(-9, 9)), max_size=4).map(tuple),
    min_tokens=st.integers(0, 5),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(st.tuples(samplings, st.booleans()), min_size=1, max_size=5),
    data=st.integers(0, 2**32 - 1),
    num_first=st.sampled_from([4, 16, 512]),
    sorts_fast=st.booleans(),
)
def test_every_combination_of_parameters_gives_the_ids_of_the_reference(
    rows: list[tuple[Sampling, bool]], data: int, num_first: int, sorts_fast: bool
) -> None:
    rng = np.random.default_rng(data)
    vocab, steps = 23, 6
    contexts = [rng.integers(0, vocab, rng.integers(1, 9)).tolist() for _ in rows]
    states = [
        state_of(sampling, context, constrained=constrained)
        for (sampling, constrained), context in zip(rows, contexts, strict=True)
    ]
    outputs: list[list[int]] = [[] for _ in rows]
    sampler = Sampler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "NUM_FIRST", num_first)  # rows that keep more are sorted
        patch.setattr(truncation, "_sorts_fast", lambda _device: sorts_fast)
        for step in range(steps):
            # Coarse values, so that ties are common.
            logits = torch.from_numpy(rng.integers(-12, 12, (len(rows), vocab)) / 4).float()
            allowed = rng.random((len(rows), vocab)) < 0.5
            allowed[:, rng.integers(5, vocab)] = True  # not an end id, which min_tokens may forbid
            masks = torch.from_numpy(allowed[[constrained for _, constrained in rows]])
            positions = [len(c) + len(o) for c, o in zip(contexts, outputs, strict=True)]
            ids = sampler.sample(logits, states, positions, masks if len(masks) else None)
            for i, (sampling, constrained) in enumerate(rows):
                values = shaped_logits(
                    logits[i].numpy(),
                    sampling,
                    contexts[i],
                    outputs[i],
                    list(END_IDS),
                    allowed[i] if constrained else None,
                )
                distribution = probabilities(values, sampling)
                expected = draw(distribution, sampling.seed or 0, positions[i])
                assert ids[i] == expected, (step, sampling)
                outputs[i].append(expected)


def test_a_row_is_sampled_the_same_alone_in_a_batch_and_when_the_batch_changes() -> None:
    rng = np.random.default_rng(3)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
        {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"presence_penalty": 1.0, "logit_bias": ((7, 3.0),)},
        {"temperature": 1.0, "top_p": 0.999},
    ]
    rows = [Sampling(seed=i, **kind) for i, kind in enumerate(kinds * 2)]
    logits = [random_logits(len(rows), vocab=1500) for _ in range(12)]  # so that repetition is likely
    alone = []
    for i, sampling in enumerate(rows):
        state, sampler = state_of(sampling, [5, 6]), Sampler()
        alone.append([sampler.sample(step[i : i + 1], [state], [2 + n])[0] for n, step in enumerate(logits)])
    states, sampler = [state_of(sampling, [5, 6]) for sampling in rows], Sampler()
    together: list[list[int | None]] = [[] for _ in rows]
    while any(len(ids) < len(logits) for ids in together):
        chosen = [i for i, ids in enumerate(together) if len(ids) < len(logits) and rng.random() < 0.7]
        if chosen:
            table = torch.stack([logits[len(together[i])][i] for i in chosen])
            positions = [2 + len(together[i]) for i in chosen]
            ids = sampler.sample(table, [states[i] for i in chosen], positions)
            for i, token in zip(chosen, ids, strict=True):
                together[i].append(token)
    assert together == alone


def test_greedy_takes_the_largest_and_on_a_tie_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [3.0, -1.0, 2.0, 3.0]])
    assert sample(logits, [GREEDY, GREEDY]) == [1, 0]


def test_a_temperature_close_to_zero_is_greedy() -> None:
    logits = random_logits(4) * 1e4
    cold = [Sampling(temperature=1e-5, seed=i) for i in range(4)]
    assert sample(logits, cold) == sample(logits, [GREEDY] * 4)


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.7},
        {"temperature": 1.0},
        {"temperature": 2.5, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.0, "frequency_penalty": 0.5, "logit_bias": ((2, 1.5),)},
    ],
)
@pytest.mark.parametrize("by", ["position", "seed"])
def test_frequencies_follow_the_distribution(parameters: dict[str, Any], by: str) -> None:
    """Chi-square with fixed seeds, over positions of one seed and over neighbouring seeds at one position."""
    logits, num_draws = random_logits(1, vocab=8, seed=5) / 3, 20_000
    expected = probabilities(
        shaped_logits(logits[0].numpy(), Sampling(**parameters), [], [], [], None), Sampling(**parameters)
    )
    positions = list(range(num_draws)) if by == "position" else [11] * num_draws
    seeds = [7] * num_draws if by == "position" else list(range(num_draws))
    rows = [Sampling(seed=seed, **parameters) for seed in seeds]
    ids = sample(logits.expand(num_draws, -1), rows, positions)
    counts = np.bincount(np.array(ids, dtype=np.int64), minlength=8)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts[kept] - num_draws * expected[kept]) ** 2 / (num_draws * expected[kept])).sum()
    limit = min(value for degrees, value in CHI_SQUARE_LIMIT.items() if degrees >= kept.sum() - 1)
    assert chi_square < limit


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    weights = torch.tensor([[0.1, 0.4, 0.3, 0.2]], dtype=torch.float64)
    one, huge = torch.tensor([[1]]), torch.tensor([[2**31]])

    def kept(top_k: torch.Tensor, top_p: float) -> list[bool]:
        return truncation.likeliest(weights, top_k, torch.tensor([[top_p]], dtype=torch.float64))[0].tolist()

    assert kept(huge, 0.65) == [False, True, True, False]
    assert kept(huge, 0.75) == [False, True, True, True]
    assert kept(one, 1.0) == [False, True, False, False]


@settings(max_examples=60, deadline=None)
@given(
    data=st.integers(0, 2**32 - 1),
    top_k=st.sampled_from([1, 5, 511, 512, 513, 1999, 2000, 2**31]),
    top_p=st.sampled_from([1e-9, 0.3, 0.95, 0.9999, 1.0]),
    flat=st.booleans(),
    sorts_fast=st.booleans(),
)
def test_large_vocabularies_are_truncated_as_small_ones(
    data: int, top_k: int, top_p: float, flat: bool, sorts_fast: bool
) -> None:
    rng = np.random.default_rng(data)
    values = np.round(rng.normal(0, 0.1 if flat else 3, 2000), 2)
    weights = torch.from_numpy(np.exp(values - values.max()))[None]
    kept = truncation.likeliest(
        weights, torch.tensor([[top_k]]), torch.tensor([[top_p]], dtype=torch.float64)
    )
    expected = probabilities(values, Sampling(temperature=1.0, top_k=top_k, top_p=top_p)) > 0
    assert abs(int(kept.sum()) - int(expected.sum())) <= 1  # the sum itself is rounded
    assert (kept[0].numpy() == expected).mean() >= 1999 / 2000


def test_seed_and_position_both_change_the_draw() -> None:
    logits = torch.zeros(1, 10_000)
    ids = {
        sample(logits, [Sampling(temperature=1.0, seed=seed)], [position])[0]
        for seed in (1, 2, 2**64 - 1)
        for position in (0, 1)
    }
    assert len(ids) == 6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_none_and_spares_the_others(bad: float) -> None:
    logits = random_logits(4)
    others = [Sampling(temperature=1.0, top_p=0.9, seed=3), GREEDY, Sampling(min_tokens=3, logprobs=2)]
    for first in (GREEDY, Sampling(temperature=1.0, presence_penalty=0.5, logprobs=1, seed=3)):
        spoilt = logits.clone()
        spoilt[0, 4] = bad
        expected = sample(logits, [first, *others])
        assert sample(spoilt, [first, *others]) == [None, *expected[1:]]


def test_penalties_at_the_ends_of_their_range_give_an_id() -> None:
    for penalty in (1e-6, 100.0):
        rows = [
            Sampling(temperature=t, repetition_penalty=penalty, logit_bias=((3, 100.0),), seed=1)
            for t in (0.0, 1e-5, 100.0)
        ]
        for sampling in rows:
            check_sampling(sampling, vocab_size=50)
        states = [state_of(sampling, range(50)) for sampling in rows]
        assert None not in Sampler().sample(random_logits(3), states, [50] * 3)


def test_a_row_without_any_id_that_may_follow_gives_none() -> None:
    state = state_of(GREEDY, constrained=True)
    allowed = torch.zeros(1, 50, dtype=torch.bool)
    assert Sampler().sample(random_logits(1), [state], [0], allowed) == [None]


def test_logprobs_are_the_models_own_and_the_best_come_first() -> None:
    logits = random_logits(2)
    sampling = Sampling(temperature=2.0, seed=1, logit_bias=((3, 50.0),), logprobs=4)
    states = [state_of(sampling), state_of(Sampling(logprobs=0))]
    ids = Sampler().sample(logits, states, [0, 0])
    assert ids[0] == 3
    expected = torch.log_softmax(logits.double(), dim=1)
    assert states[0].log is not None
    packed = states[0].log.pack(0, 1)
    assert np.frombuffer(packed.token_ids, "<i4").tolist() == [3]
    assert np.frombuffer(packed.values, "<f4")[0] == pytest.approx(float(expected[0, 3]), abs=1e-5)
    best = torch.topk(expected[0], 4)
    assert np.frombuffer(packed.top_ids, "<i4").tolist() == best.indices.tolist()
    assert np.frombuffer(packed.top_values, "<f4") == pytest.approx(best.values.numpy(), abs=1e-5)
    assert states[1].log is not None
    assert (len(states[1].log), states[1].log.pack(0, 1).top_ids) == (1, b"")


def test_a_request_without_a_seed_gets_a_fresh_one() -> None:
    assert state_of(Sampling()).seed != state_of(Sampling()).seed
    assert state_of(Sampling(seed=-1)).seed == 2**64 - 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3.0}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": ((50, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((3, float("nan")),)}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(Sampling(**fields), vocab_size=50)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_gives_the_ids_of_the_cpu() -> None:
    rows = [
        Sampling(temperature=0.9, seed=1),
        Sampling(),
        Sampling(temperature=1.1, top_p=0.9, seed=2, logprobs=3),
        Sampling(temperature=1.0, top_k=30, min_p=0.01, repetition_penalty=1.2, seed=3),
        Sampling(frequency_penalty=0.5, presence_penalty=0.5, logit_bias=((9, 4.0),), min_tokens=3),
        Sampling(temperature=2.0, top_p=0.999, seed=4),
        Sampling(temperature=0.6, min_p=0.05, seed=5),
    ]
    constrained = [False, False, True, False, True, False, False]
    allowed = torch.rand(2, 2000, generator=torch.Generator().manual_seed(1)) < 0.3
    ids: list[list[list[int | None]]] = []
    for device in ("cpu", "cuda"):
        states = [state_of(s, [5, 6], constrained=c) for s, c in zip(rows, constrained, strict=True)]
        sampler = Sampler()
        steps = [random_logits(7, vocab=2000, seed=step // 4).to(device) for step in range(8)]
        ids.append(
            [sampler.sample(step, states, [2 + n] * 7, allowed.to(device)) for n, step in enumerate(steps)]
        )
    assert ids[0] == ids[1]
