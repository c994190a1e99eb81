"""Choosing the next id from logits: greedy, temperature and top-p, with a seed per output.

The random number of a draw depends on (seed, position in the context) alone, so that a seeded output is the
same whether the call runs by itself, in a batch, or again after a preemption.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .._core import argmax_rows
from ..errors import InvalidRequest
from ..wire import Sampling

GREEDY_BELOW = 1e-5  # a colder temperature is greedy


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row of logits is sampled. ``position`` is the index that the new id will have."""

    temperature: float
    top_p: float
    seed: int
    position: int


def check_sampling(sampling: Sampling) -> None:
    """Raise :class:`InvalidRequest` for a parameter out of range."""
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens = {sampling.max_tokens} is below 1", param="max_tokens")
    if not 0 <= sampling.temperature <= 100:
        raise InvalidRequest(f"temperature = {sampling.temperature} is outside [0, 100]", param="temperature")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p = {sampling.top_p} is outside (0, 1]", param="top_p")


def choose_seed(sampling: Sampling) -> int:
    """The seed of an output as an unsigned 64-bit number; a fresh one if the request has none."""
    return secrets.randbits(64) if sampling.seed is None else sampling.seed % 2**64


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """One id per row of ``logits`` (float [n, vocab]); None for a row that has a NaN or an infinity.

    Equal logits go to the lowest id.
    """
    ids = _greedy(logits)
    random = [i for i, draw in enumerate(draws) if ids[i] is not None and draw.temperature >= GREEDY_BELOW]
    # Apart, because the order in which ids are laid out decides which one a number hits: a row must not
    # depend on what else is in the batch.
    plain = [i for i in random if draws[i].top_p >= 1]
    nucleus = [i for i in random if draws[i].top_p < 1]
    for rows, draw_rows in ((plain, _draw_plain), (nucleus, _draw_nucleus)):
        if rows:
            drawn = draw_rows(logits[rows], [draws[i] for i in rows])
            for i, token_id in zip(rows, drawn.tolist(), strict=True):
                ids[i] = token_id
    return ids


def _greedy(logits: Tensor) -> list[int | None]:
    """The likeliest id of each row; None for a row that is not finite."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        found = np.empty(len(logits), np.int64)
        argmax_rows(logits.contiguous().numpy(), found)  # one pass; torch needs two and a mask
        return [token_id if token_id >= 0 else None for token_id in found.tolist()]
    finite = torch.isfinite(logits).all(dim=1).tolist()
    likeliest = torch.argmax(logits, dim=1).tolist()
    return [token_id if ok else None for token_id, ok in zip(likeliest, finite, strict=True)]


def _draw_plain(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """int64 [n]: one id per row from the whole distribution."""
    return _pick(_weights(logits, draws), draws).squeeze(1)


def _draw_nucleus(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """int64 [n]: one id per row from the smallest set of likely ids whose mass reaches top_p."""
    weights, order = torch.sort(_weights(logits, draws), dim=1, descending=True, stable=True)
    cumulative = torch.cumsum(weights, dim=1)
    top_p = _column([draw.top_p for draw in draws], logits.device)
    outside = cumulative - weights >= top_p * cumulative[:, -1:]
    return order.gather(1, _pick(weights.masked_fill(outside, 0.0), draws)).squeeze(1)


def _weights(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """float64 [n, vocab]: unnormalised probabilities, the largest of each row 1."""
    logits = logits.double()
    temperature = _column([draw.temperature for draw in draws], logits.device)
    # Subtract before dividing: a small temperature would send large logits to infinity.
    return torch.exp((logits - logits.amax(dim=1, keepdim=True)) / temperature)


def _pick(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """int64 [n, 1]: the index that each row's own uniform number falls on (inverse transform)."""
    cumulative = torch.cumsum(weights, dim=1)
    total = cumulative[:, -1:]
    target = _column([_uniform(draw) for draw in draws], weights.device) * total
    below_total = torch.nextafter(total, torch.zeros_like(total))  # rounding must not pass the last id
    return torch.searchsorted(cumulative, torch.minimum(target, below_total), right=True)


def _uniform(draw: Draw) -> float:
    """A uniform number in [0, 1) that depends on seed and position alone (counter-based, no state)."""
    return float(np.random.Generator(np.random.Philox(key=draw.seed, counter=draw.position)).random())


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]
