"""Sampling written out slowly, one row at a time in float64: what the engine's sampler must agree with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parrot.engine.randomness import uniform
from parrot.wire import Sampling


def shaped_logits(
    logits: np.ndarray,
    sampling: Sampling,
    context: Sequence[int],
    output: Sequence[int],
    end_ids: Sequence[int],
    allowed: np.ndarray | None,
) -> np.ndarray:
    """What is left of the logits after bias, penalties, min_tokens and a grammar."""
    values = [float(value) for value in logits]
    for token, bias in sampling.logit_bias:
        values[token] += bias
    for token in range(len(values)):
        if token in context or token in output:
            if values[token] > 0:
                values[token] /= sampling.repetition_penalty
            else:
                values[token] *= sampling.repetition_penalty
        count = list(output).count(token)
        values[token] -= sampling.frequency_penalty * count
        values[token] -= sampling.presence_penalty * (count > 0)
        if len(output) < sampling.min_tokens and token in end_ids:
            values[token] = -np.inf
        if allowed is not None and not allowed[token]:
            values[token] = -np.inf
    return np.array(values)


def probabilities(values: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution that an id is drawn from."""
    if sampling.temperature < 1e-5:
        return np.eye(len(values))[int(np.argmax(values))]
    weights = np.exp((values - values.max()) / sampling.temperature)
    weights[weights < sampling.min_p * weights.max()] = 0.0
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    total, before, kept = sum(weights[order]), 0.0, []
    for token in order:
        if before >= sampling.top_p * total:
            break
        before += weights[token]
        kept.append(token)
    result = np.zeros(len(weights))
    result[kept] = weights[kept]
    return result / result.sum()


def draw(distribution: np.ndarray, seed: int, position: int) -> int:
    """Inverse transform in the order of ids."""
    number = float(uniform(np.array([seed], dtype=np.uint64), [position])[0])
    cumulative = np.cumsum(distribution)
    return int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
