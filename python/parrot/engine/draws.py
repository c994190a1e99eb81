"""Drawing ids: the parameters of each row as a GPU's kernels read them, and the same in float64 in torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import e, log2
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..kernels.draws import DRAW, Draws
from ..wire import Sampling
from .randomness import U64, uniform
from .truncation import likeliest

if TYPE_CHECKING:
    from .sampling import OutputState

_CPU_CHUNK = 2**17  # float64 elements worked on at a time on a CPU: about what its cache holds
_ALL = 2**31  # as top_k: off


def top_k_of(sampling: Sampling) -> int:
    """How many of the likeliest ids may be drawn; more than any vocabulary has if all."""
    return sampling.top_k if sampling.top_k > 0 else _ALL


def on_device(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """[n]. A copy from memory that is not pinned would wait for all that the device has to do."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def parts_of(table: Tensor) -> list[slice]:
    """The rows of a table [n, vocab] in the pieces in which they are worked on."""
    size = max(1, len(table) if table.is_cuda else _CPU_CHUNK // table.shape[1])
    return [slice(start, start + size) for start in range(0, len(table), size)]


class DrawTable:
    """The draws of the rows of one batch; its positions alone change from step to step."""

    def __init__(self, states: Sequence[OutputState]) -> None:
        self.states = list(states)
        self._rows = [row for row, s in enumerate(states) if s.is_random and not s.is_shaped]
        self._seeds = np.array([states[row].seed for row in self._rows], dtype=np.uint64)
        self._draws = np.zeros(len(states), dtype=DRAW)
        for row in self._rows:
            sampling = states[row].sampling
            scale = log2(e) / sampling.temperature
            self._draws[row] = (0.0, sampling.top_p, top_k_of(sampling), scale, sampling.min_p)

    def at(self, positions: Sequence[int]) -> Draws | None:
        """For ids that will have these positions, one per row; None if nothing is drawn from logits as they
        come. Valid until the next time."""
        if not self._rows:
            return None
        self._draws["target"][self._rows] = uniform(self._seeds, [positions[row] for row in self._rows])
        return self._draws


@dataclass(slots=True)
class ExactDraw:
    """Rows that are drawn the same way in float64, from logits as they come or from shaped ones."""

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
        return torch.cat([self._ids(logits[part], target[part], part) for part in parts_of(logits)])

    def _targets(self, positions: Sequence[int], device: torch.device) -> Tensor:
        number = uniform(self.seeds, [positions[row] for row in self.row_list])
        return on_device(device, number.tolist(), torch.float64)

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


def exact_draws(
    states: Sequence[OutputState], shaped: Sequence[int], device: torch.device, rows: Iterable[int]
) -> list[ExactDraw]:
    """Those of ``rows`` that are drawn, by what that takes; logits of rows ``shaped`` are changed before."""
    place = {row: i for i, row in enumerate(shaped)}
    groups: dict[tuple[bool, bool, bool], list[int]] = {}
    for row in rows:
        if states[row].is_random:
            sampling = states[row].sampling
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
) -> ExactDraw:
    samplings = [states[row].sampling for row in rows]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return on_device(device, values, dtype)[:, None]

    return ExactDraw(
        rows=on_device(device, rows, torch.int64),
        row_list=rows,
        is_shaped=is_shaped,
        source_rows=on_device(device, [place.get(row, 0) for row in rows], torch.int64),
        temperature=column([sampling.temperature for sampling in samplings]),
        min_p=column([sampling.min_p for sampling in samplings]) if has_min_p else None,
        seeds=np.array([states[row].seed for row in rows], dtype=np.uint64),
        top_k=column([top_k_of(sampling) for sampling in samplings], torch.int64) if is_truncated else None,
        top_p=column([sampling.top_p for sampling in samplings]),
    )
