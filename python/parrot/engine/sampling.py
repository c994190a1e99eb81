"""Choosing the next id of every running output from one batch of logits (docs/sampling.md).

Everything is done on the logits' device, for all rows of a kind together. A row's id depends on its own
logits, parameters, seed and position alone: it is the same by itself, in any batch, and after a preemption.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .._core import argmax_rows
from ..errors import InvalidRequest
from ..kernels.draws import Draws
from ..wire import Ids, Sampling
from .draws import DrawTable, exact_draws, on_device, parts_of
from .logprobs import LogprobLog, log_batch
from .randomness import fresh_seed

GREEDY_BELOW = 1e-5  # a colder temperature is greedy
_NEVER = float("-inf")


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raise :class:`InvalidRequest` for a parameter out of range, or an id outside the vocabulary."""
    penalty_limits = (-2.0, 2.0, "[-2, 2]")
    for name, (low, high, shown) in {
        "max_tokens": (1, 2**31, "[1, 2^31]"),
        "min_tokens": (0, sampling.max_tokens, f"[0, max_tokens = {sampling.max_tokens}]"),
        "temperature": (0.0, 100.0, "[0, 100]"),
        "top_p": (np.nextafter(0, 1), 1.0, "(0, 1]"),
        "top_k": (-1, 2**31, "[-1, 2^31]"),
        "min_p": (0.0, 1.0, "[0, 1]"),
        "presence_penalty": penalty_limits,
        "frequency_penalty": penalty_limits,
        "repetition_penalty": (1e-6, 100.0, "[1e-6, 100]"),
        "logprobs": (0, vocab_size, f"[0, {vocab_size}]"),
        "prompt_logprobs": (0, vocab_size, f"[0, {vocab_size}]"),
    }.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"{name} = {value} is outside {shown}", param=name)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size)
    for token_id, bias in sampling.logit_bias:
        if not -100 <= bias <= 100:
            raise InvalidRequest(
                f"logit_bias: {bias} for token {token_id} is outside [-100, 100]", param="logit_bias"
            )


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name}: token id {token_id} is outside [0, {vocab_size})", param=name)


class OutputState:
    """What the sampling of one output keeps from step to step. Its ids are those of the context from
    ``start`` on; ``context`` (int32 [start]) are the ids before, ``end_ids`` the ids that end it."""

    def __init__(
        self, sampling: Sampling, start: int, context: Ids, end_ids: frozenset[int], *, constrained: bool
    ) -> None:
        self.sampling = sampling
        self.seed = fresh_seed(sampling.seed)
        self.start = start
        self.end_ids = end_ids
        self.constrained = constrained
        self.log = None if sampling.logprobs is None else LogprobLog(sampling.logprobs)
        self.context_ids = np.unique(context) if sampling.repetition_penalty != 1.0 else np.empty(0, np.int32)
        self.counts: Tensor | None = None  # float64 [vocab]: how often the output has each id; on the device
        self._forced: list[int] = []  # ids that came without sampling and are not counted yet

    @property
    def is_random(self) -> bool:
        """Whether ids are drawn; the others are the likeliest."""
        return self.sampling.temperature >= GREEDY_BELOW

    @property
    def is_penalised(self) -> bool:
        """Whether ids that were there before are treated differently."""
        sampling = self.sampling
        return sampling.repetition_penalty != 1.0 or bool(
            sampling.presence_penalty or sampling.frequency_penalty
        )

    @property
    def is_shaped(self) -> bool:
        """Whether anything is done to its logits before an id is chosen."""
        sampling = self.sampling
        return bool(self.is_penalised or sampling.logit_bias or sampling.min_tokens or self.constrained)

    def add_forced(self, ids: Sequence[int]) -> None:
        """The output got ids without sampling."""
        if self.is_penalised:
            self._forced += ids

    def count_forced(self) -> None:
        """Add what came without sampling to ``counts``."""
        if self._forced and self.counts is not None:
            index = torch.tensor(self._forced, device=self.counts.device)
            self.counts.index_add_(0, index, torch.ones_like(index, dtype=self.counts.dtype))
            self._forced.clear()


class Sampler:
    """Samples step after step; what it derives from the parameters is kept while the batch is the same."""

    def __init__(self) -> None:
        self._plan: _Plan | None = None
        self._table: DrawTable | None = None

    def draws(self, states: Sequence[OutputState], positions: Sequence[int]) -> Draws | None:
        """[n], one of :data:`~parrot.kernels.draws.DRAW` per row, for a step that chooses ids on its device
        (:meth:`choose`); None if nothing is drawn from logits as they come."""
        if self._table is None or self._table.states != states:
            self._table = DrawTable(states)
        return self._table.at(positions)

    def sample(
        self,
        logits: Tensor,
        states: Sequence[OutputState],
        positions: Sequence[int],
        allowed: Tensor | None = None,
        likeliest: Tensor | None = None,
    ) -> list[int | None]:
        """One id per row of ``logits`` (:meth:`choose`); None for a row that has none."""
        return to_list(self.choose(logits, states, positions, allowed, likeliest))

    def choose(
        self,
        logits: Tensor,
        states: Sequence[OutputState],
        positions: Sequence[int],
        allowed: Tensor | None = None,
        likeliest: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> Tensor:
        """int64 [n], on the logits' device: one id per row of ``logits`` (float [n, vocab]); -1 for a row
        that has a NaN or an infinity, or no id that may follow.

        ``positions[i]`` is the index that row i's id will have in its context. ``allowed`` (bool
        [c, vocab]) says for the c constrained rows, in order, which ids may follow. ``likeliest``: what
        :func:`likeliest_ids` gives, if it is known; ``drawn``, int64 [n]: what a step made of :meth:`draws`,
        if it did. Equal logits go to the lowest id.
        """
        if self._plan is None or self._plan.states != states or self._plan.device != logits.device:
            self._plan = _Plan(states, logits.device, logits.shape[1])
        plan = self._plan
        if drawn is None and _has_kernels(logits.device):
            drawn, likeliest = self._draw(logits, states, positions, likeliest)
        if likeliest is None:
            likeliest = likeliest_ids(logits)
        ids = likeliest if drawn is None else drawn
        if plan.is_settled:
            return ids
        ids = ids.clone()
        if plan.shaped is not None:
            shaped = plan.shape(logits[plan.shaped].double(), positions, allowed)
            ids[plan.shaped] = torch.argmax(shaped, dim=1)
        for draw in plan.draws:
            source = shaped[draw.source_rows] if draw.is_shaped else logits[draw.rows].double()
            ids[draw.rows] = draw.ids(source, positions)
        ok = (likeliest >= 0) & (ids < logits.shape[1])  # a draw from a NaN ends behind the last id
        plan.note(logits, torch.where(ok, ids, 0))
        if allowed is not None:
            ok[plan.constrained] &= allowed.any(dim=1)
        return torch.where(ok, ids, -1)

    def _draw(
        self,
        logits: Tensor,
        states: Sequence[OutputState],
        positions: Sequence[int],
        likeliest: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What a step would have made of :meth:`draws`, None if that is nothing; and the likeliest ids."""
        from ..kernels.triton_draw import draw  # Triton, which is not everywhere

        draws = self.draws(states, positions)
        if draws is None:
            return None, likeliest
        packed = torch.from_numpy(draws.view(np.int32)).pin_memory()
        return draw(logits.contiguous(), packed.to(logits.device, non_blocking=True))


def likeliest_ids(logits: Tensor) -> Tensor:
    """int64 [n]: the likeliest id of each row; -1 for a row that is not finite."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        found = np.empty(len(logits), np.int64)
        argmax_rows(logits.contiguous().numpy(), found)  # one pass; torch needs two and a mask
        return torch.from_numpy(found)
    if _has_kernels(logits.device):
        from ..kernels.triton_ids import likeliest_of_rows

        return likeliest_of_rows(logits.contiguous())
    return torch.where(torch.isfinite(logits).all(dim=1), torch.argmax(logits, dim=1), -1)


@cache
def _has_kernels(device: torch.device) -> bool:
    """Whether ids of logits as they come are chosen by kernels there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def to_list(ids: Tensor) -> list[int | None]:
    """Of int64 [n], with None for what is negative."""
    return [None if token_id < 0 else token_id for token_id in ids.tolist()]


class _Plan:
    """The rows of one batch by what they need, with their parameters as tensors."""

    def __init__(self, states: Sequence[OutputState], device: torch.device, vocab_size: int) -> None:
        self.states = list(states)
        self.device = device
        shaped = [i for i, state in enumerate(states) if state.is_shaped]
        self.shaped = self._index(shaped) if shaped else None
        self._shaped_states = [states[i] for i in shaped]
        self._shaped_rows = shaped
        constrained = [i for i, state in enumerate(self._shaped_states) if state.constrained]
        self._constrained = self._index(constrained)
        self.constrained = self._index([shaped[i] for i in constrained])
        self._logged = [i for i, state in enumerate(states) if state.log is not None]
        self.draws = exact_draws(
            states, shaped, device, shaped if _has_kernels(device) else range(len(states))
        )
        self.is_settled = not (shaped or self._logged or self.draws)
        self._plan_bias()
        self._plan_penalties(vocab_size)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return on_device(self.device, rows, torch.int64)

    def _column(self, values: Sequence[float]) -> Tensor:
        return on_device(self.device, values, torch.float64)[:, None]

    def _plan_bias(self) -> None:
        entries = [(i, *entry) for i, s in enumerate(self._shaped_states) for entry in s.sampling.logit_bias]
        rows, ids, values = zip(*entries, strict=True) if entries else ((), (), ())
        self._bias_at = (self._index(rows), self._index(ids))
        self._bias = on_device(self.device, values, torch.float64)

    def _plan_penalties(self, vocab_size: int) -> None:
        """``_counts`` holds the rows' counts from here on; each state keeps a view of its row."""
        rows = [i for i, state in enumerate(self._shaped_states) if state.is_penalised]
        self._penalised = self._index(rows)
        self._penalised_states = [self._shaped_states[i] for i in rows]
        self._penalised_rows = self._index([self._shaped_rows[i] for i in rows])
        states = self._penalised_states
        self._repetition = self._column([s.sampling.repetition_penalty for s in states])
        self._presence = self._column([s.sampling.presence_penalty for s in states])
        self._frequency = self._column([s.sampling.frequency_penalty for s in states])
        self._counts = torch.zeros(len(states), vocab_size, dtype=torch.float64, device=self.device)
        self._in_context = torch.zeros(len(states), vocab_size, dtype=torch.bool, device=self.device)
        for i, state in enumerate(states):
            if state.counts is not None:
                self._counts[i] = state.counts
            state.counts = self._counts[i]
            self._in_context[i, torch.from_numpy(state.context_ids).to(self.device, torch.int64)] = True

    def shape(self, logits: Tensor, positions: Sequence[int], allowed: Tensor | None) -> Tensor:
        """Bias, penalties, ids that may not come yet, the grammar: ``logits`` float64 [shaped, vocab]."""
        if len(self._bias):
            logits = logits.index_put(self._bias_at, self._bias, accumulate=True)
        if len(self._penalised):
            for state in self._penalised_states:
                state.count_forced()
            for part in parts_of(self._counts):
                rows = self._penalised[part]
                logits[rows] = self._penalise(logits[rows], part)
        for i, state in enumerate(self._shaped_states):
            too_early = positions[self._shaped_rows[i]] - state.start < state.sampling.min_tokens
            if too_early and state.end_ids:
                logits[i, list(state.end_ids)] = _NEVER
        if allowed is not None:
            logits[self._constrained] = logits[self._constrained].masked_fill(~allowed, _NEVER)
        return logits

    def _penalise(self, logits: Tensor, part: slice) -> Tensor:
        counts, repetition = self._counts[part], self._repetition[part]
        was_there = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(was_there | self._in_context[part], repeated, logits)
        return logits - self._frequency[part] * counts - self._presence[part] * was_there

    def note(self, logits: Tensor, ids: Tensor) -> None:
        """Count the ids that were chosen, and log their probabilities."""
        if len(self._penalised):
            chosen = ids[self._penalised_rows][:, None]
            self._counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
        if self._logged:
            logs = [log for i in self._logged if (log := self.states[i].log) is not None]
            log_batch(logs, logits[self._logged], ids[self._logged])
