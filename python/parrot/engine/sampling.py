"""Choosing the next id of every running output from one batch of logits (docs/sampling.md).

Everything is done on the logits' device, for all rows of a kind together. A row's id depends on its own
logits, parameters, seed and position alone: it is the same by itself, in any batch, and after a preemption.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .._core import argmax_rows
from ..errors import InvalidRequest
from ..wire import Ids, Sampling
from .logprobs import LogprobLog, log_batch
from .randomness import U64, fresh_seed, uniform
from .truncation import likeliest

GREEDY_BELOW = 1e-5  # a colder temperature is greedy
_NEVER = float("-inf")
_CPU_CHUNK = 2**17  # float64 elements worked on at a time on a CPU: about what its cache holds


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
    ) -> Tensor:
        """int64 [n], on the logits' device: one id per row of ``logits`` (float [n, vocab]); -1 for a row
        that has a NaN or an infinity, or no id that may follow.

        ``positions[i]`` is the index that row i's id will have in its context. ``allowed`` (bool
        [c, vocab]) says for the c constrained rows, in order, which ids may follow. ``likeliest``: what
        :func:`likeliest_ids` gives, if it is known. Equal logits go to the lowest id.
        """
        if self._plan is None or self._plan.states != states or self._plan.device != logits.device:
            self._plan = _Plan(states, logits.device, logits.shape[1])
        plan = self._plan
        if likeliest is None:
            likeliest = likeliest_ids(logits)
        if plan.is_plain:
            return likeliest
        ids = likeliest.clone()
        if plan.shaped is not None:
            shaped = plan.shape(logits[plan.shaped].double(), positions, allowed)
            ids[plan.shaped] = torch.argmax(shaped, dim=1)
        for draw in plan.draws:
            if draw.is_shaped:
                ids[draw.rows] = draw.ids(shaped[draw.source_rows], positions)
            else:
                ids[draw.rows] = draw.ids_unshaped(logits, likeliest, positions)
        ok = (likeliest >= 0) & (ids < logits.shape[1])  # a draw from a NaN ends behind the last id
        plan.note(logits, torch.where(ok, ids, 0))
        if allowed is not None:
            ok[plan.constrained] &= allowed.any(dim=1)
        return torch.where(ok, ids, -1)


def likeliest_ids(logits: Tensor) -> Tensor:
    """int64 [n]: the likeliest id of each row; -1 for a row that is not finite."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        found = np.empty(len(logits), np.int64)
        argmax_rows(logits.contiguous().numpy(), found)  # one pass; torch needs two and a mask
        return torch.from_numpy(found)
    if logits.is_cuda and logits.dtype != torch.float64 and _has_triton():
        from ..kernels.triton_ids import likeliest_of_rows

        return likeliest_of_rows(logits.contiguous())
    return torch.where(torch.isfinite(logits).all(dim=1), torch.argmax(logits, dim=1), -1)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def to_list(ids: Tensor) -> list[int | None]:
    """Of int64 [n], with None for what is negative."""
    return [None if token_id < 0 else token_id for token_id in ids.tolist()]


def _on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """[n]. A copy from memory that is not pinned would wait for all that the device has to do."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _parts(table: Tensor) -> list[slice]:
    """The rows of a table [n, vocab] in the pieces in which they are worked on."""
    size = max(1, len(table) if table.is_cuda else _CPU_CHUNK // table.shape[1])
    return [slice(start, start + size) for start in range(0, len(table), size)]


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
        self.draws = _draws(states, shaped, device)
        self.is_plain = not (shaped or self._logged or self.draws)
        self._plan_bias()
        self._plan_penalties(vocab_size)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return _on(self.device, rows, torch.int64)

    def _column(self, values: Sequence[float]) -> Tensor:
        return _on(self.device, values, torch.float64)[:, None]

    def _plan_bias(self) -> None:
        entries = [(i, *entry) for i, s in enumerate(self._shaped_states) for entry in s.sampling.logit_bias]
        rows, ids, values = zip(*entries, strict=True) if entries else ((), (), ())
        self._bias_at = (self._index(rows), self._index(ids))
        self._bias = _on(self.device, values, torch.float64)

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
            for part in _parts(self._counts):
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


@dataclass(slots=True)
class _Draw:
    """Rows that are drawn the same way, from logits as they come or from shaped ones."""

    rows: Tensor  # int64 [r]
    row_list: list[int]
    is_shaped: bool
    source_rows: Tensor  # int64 [r], their places among the shaped rows
    temperature: Tensor  # float64 [r, 1]
    min_p: Tensor | None  # float64 [r, 1]; None: off
    seeds: U64  # [r]
    top_k: Tensor | None  # int64 [r, 1]; None: neither top_k nor top_p is on
    top_p: Tensor  # float64 [r, 1]

    def ids(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """int64 [r]: one id per row of float64 [r, vocab], by inverse transform in the order of ids."""
        target = self._targets(positions, logits.device)[:, None]
        return torch.cat([self._ids(logits[part], target[part], part) for part in _parts(logits)])

    def ids_unshaped(self, logits: Tensor, likeliest: Tensor, positions: Sequence[int]) -> Tensor:
        """The same from the logits of the whole batch, [n, vocab] as they come; ``likeliest`` int64 [n]."""
        if not (logits.is_cuda and _has_triton()):
            return self.ids(logits[self.rows].double(), positions)
        from ..kernels.triton_draw import DrawParameters, draw  # Triton, which is not everywhere

        parameters = DrawParameters(
            rows=self.rows,
            temperature=self.temperature[:, 0],
            min_p=None if self.min_p is None else self.min_p[:, 0],
            top_k=None if self.top_k is None else self.top_k[:, 0],
            top_p=self.top_p[:, 0],
        )
        return draw(logits, likeliest, self._targets(positions, logits.device), parameters)

    def _targets(self, positions: Sequence[int], device: torch.device) -> Tensor:
        number = uniform(self.seeds, [positions[row] for row in self.row_list])
        return _on(device, number.tolist(), torch.float64)

    def _ids(self, logits: Tensor, target: Tensor, part: slice) -> Tensor:
        # Subtract before dividing: a small temperature would send large logits to infinity.
        weights = ((logits - logits.amax(dim=1, keepdim=True)) / self.temperature[part]).exp_()
        if self.min_p is not None:
            weights.masked_fill_(weights < self.min_p[part], 0.0)  # the likeliest id has weight 1
        if self.top_k is not None:
            weights.masked_fill_(~likeliest(weights, self.top_k[part], self.top_p[part]), 0.0)
        cumulative = torch.cumsum(weights, dim=1)
        total = cumulative[:, -1:]
        below_total = torch.nextafter(total, torch.zeros_like(total))  # rounding must not pass the last id
        return torch.searchsorted(cumulative, torch.minimum(target * total, below_total), right=True)[:, 0]


def _draws(states: Sequence[OutputState], shaped: Sequence[int], device: torch.device) -> list[_Draw]:
    place = {row: i for i, row in enumerate(shaped)}
    groups: dict[tuple[bool, bool, bool], list[int]] = {}
    for row, state in enumerate(states):
        if state.is_random:
            sampling = state.sampling
            is_truncated = sampling.top_k > 0 or sampling.top_p < 1
            groups.setdefault((row in place, is_truncated, sampling.min_p > 0), []).append(row)
    return [_draw(rows, states, place, device, *kind) for kind, rows in groups.items()]


def _draw(
    rows: list[int],
    states: Sequence[OutputState],
    place: Mapping[int, int],
    device: torch.device,
    is_shaped: bool,
    is_truncated: bool,
    has_min_p: bool,
) -> _Draw:
    samplings = [states[row].sampling for row in rows]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return _on(device, values, dtype)[:, None]

    top_k = [sampling.top_k if sampling.top_k > 0 else 2**31 for sampling in samplings]
    return _Draw(
        rows=_on(device, rows, torch.int64),
        row_list=rows,
        is_shaped=is_shaped,
        source_rows=_on(device, [place.get(row, 0) for row in rows], torch.int64),
        temperature=column([sampling.temperature for sampling in samplings]),
        min_p=column([sampling.min_p for sampling in samplings]) if has_min_p else None,
        seeds=np.array([states[row].seed for row in rows], dtype=np.uint64),
        top_k=column(top_k, torch.int64) if is_truncated else None,
        top_p=column([sampling.top_p for sampling in samplings]),
    )
