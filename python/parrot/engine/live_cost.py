"""Keeping the cost model fresh from the steps that calls make.

Steps are sorted into cells of alike ones, and a cell stands for the median of its latest few: one slow step,
or a rare shape among thousands of others, neither bends the fit nor is lost. Where no step has been, the
model of the start holds, at the pace that was seen. The newest steps take no part in a fit but judge it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import msgspec
import numpy as np

from ..wire import CostModel, StepCost
from .cost_model import F64, fit
from .runner import Work

log = logging.getLogger(__name__)

HELD_OUT = 64  # newest steps, which judge; a fit is made whenever all of them are new
WORTH_TELLING = 0.05  # of what any step of _REFERENCE takes
_PER_CELL = 8
_LEAST_OF_CELL = 3
_MAX_CELLS = 64
_FORGET_AFTER = 4096  # steps
_HALF_LIFE = 512  # steps in which a cell comes to count half as much
_LEAST_GAIN = 0.01  # of the relative error, for which it is worth a change
_MOST_ERROR = 1.0  # that one step counts for: what a hiccup takes has no say
_CELLS_SAY = 0.25  # how much the error on cells counts beside that on the newest steps
_ANCHOR = 0.2  # how much a shape of the start counts beside a cell

# Features (:attr:`StepShape.features`) of the steps at which models are compared: decodes, then prompts.
_REFERENCE: F64 = np.array(
    [
        (1, 1, 0, 32),
        (1, 1, 0, 2048),
        (1, 4, 0, 512),
        (1, 16, 0, 512),
        (1, 16, 0, 16384),
        (1, 64, 0, 32768),
        (1, 1, 128, 128),
        (1, 1, 512, 2048),
    ],
    dtype=np.float64,
)


@dataclass(slots=True)
class _Cell:
    """The latest steps of one kind: of each how many times it took what the model of the start says, its
    features [4] and microseconds."""

    steps: deque[tuple[float, F64, float]] = field(default_factory=lambda: deque(maxlen=_PER_CELL))
    last: int = 0  # number of its newest step


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps as arrays: float64 [n, 4], [n] and [n]."""

    features: F64
    times_us: F64
    weights: F64

    @classmethod
    def of(cls, steps: list[tuple[F64, float]], weights: list[float] | None = None) -> _Steps:
        return cls(
            np.array([features for features, _ in steps]),
            np.array([took_us for _, took_us in steps]),
            np.ones(len(steps)) if weights is None else np.array(weights),
        )

    def error(self, cost: F64) -> float:
        """Mean relative error, over and under alike."""
        errors = np.abs(np.log(self.times_us / _predicted(cost, self.features)))
        return float(np.average(np.minimum(errors, _MOST_ERROR), weights=self.weights))


class LiveCost:
    """The cost model of now. What is kept is bounded. On the steps that judge it is never more than
    _LEAST_GAIN worse than the model of the start."""

    def __init__(self, start: CostModel) -> None:
        self.cost = start
        self.num_changes = 0
        self._start = coefficients(start)
        self._now = self._start
        self._cells: dict[tuple[int, ...], _Cell] = {}
        self._newest: list[tuple[F64, float]] = []
        self._num_steps = 0
        self._step: tuple[int, int, int] | None = None  # batch, prefill and KV tokens of the present one

    @property
    def changed(self) -> StepCost | None:
        """What steps have come to take; None while that is what was measured at the start."""
        if self.num_changes == 0:
            return None
        cost = self.cost
        return StepCost(cost.base_us, cost.per_sequence_us, cost.per_prefill_token_us, cost.per_kv_token_us)

    def computed(self, work: Sequence[Work], kv_tokens: int) -> None:
        """The present step has computed this, and loaded so many KV tokens."""
        self._step = len(work), sum(w.count for w in work if w.count > 1), kv_tokens

    def ended(self, took_us: int) -> bool:
        """The present step took so long; see :meth:`observe`. Steps that computed nothing do not count."""
        step, self._step = self._step, None
        return step is not None and self.observe(*step, took_us)

    def observe(self, batch: int, prefill_tokens: int, kv_tokens: int, took_us: float) -> bool:
        """A step took so long; True when ``cost`` has changed by more than WORTH_TELLING."""
        if batch <= 0 or not 0 < took_us < math.inf:
            return False
        features = np.array([1, batch, prefill_tokens, kv_tokens], dtype=np.float64)
        self._newest.append((features, took_us))
        self._num_steps += 1
        return len(self._newest) == HELD_OUT and self._refit()

    def _refit(self) -> bool:
        newest, self._newest = self._newest, []
        judges = _Steps.of(newest)
        cells = self._known_cells()
        self._now = self._best(judges, cells)
        self._keep(newest, judges)
        told = _predicted(coefficients(self.cost), _REFERENCE)
        if np.abs(_predicted(self._now, _REFERENCE) / told - 1).max() <= WORTH_TELLING:
            return False
        self.num_changes += 1
        names = StepCost.__struct_fields__
        self.cost = msgspec.structs.replace(self.cost, **dict(zip(names, self._now.tolist(), strict=True)))
        log.info("steps have come to take %s", self.changed)
        return True

    def _best(self, judges: _Steps, cells: _Steps | None) -> F64:
        """Of what could be, what is nearest to the newest steps and, with less weight, to the cells; what is
        there stays unless something is nearer by _LEAST_GAIN."""
        most = judges.error(self._start) + _LEAST_GAIN
        pace = float(np.median(judges.times_us / _predicted(self._now, judges.features)))
        candidates = [self._now * pace, self._start]
        if cells is not None:
            candidates.append(self._fit(cells))

        def score(cost: F64) -> float:
            return judges.error(cost) + (0 if cells is None else _CELLS_SAY * cells.error(cost))

        best = min((c for c in candidates if _is_possible(c) and judges.error(c) <= most), key=score)
        stays = judges.error(self._now) <= most and score(best) > score(self._now) - _LEAST_GAIN
        return self._now if stays else best

    def _known_cells(self) -> _Steps | None:
        """The median step of each cell that has enough of them, weighted by how lately it got one."""
        medians: list[tuple[F64, float]] = []
        weights: list[float] = []
        for cell in self._cells.values():
            if len(cell.steps) >= _LEAST_OF_CELL:
                _, features, took_us = sorted(cell.steps, key=itemgetter(0))[len(cell.steps) // 2]
                medians.append((features, took_us))
                weights.append(0.5 ** ((self._num_steps - cell.last) / _HALF_LIFE))
        return _Steps.of(medians, weights) if medians else None

    def _fit(self, cells: _Steps) -> F64:
        """A fit to the cells and, with little weight, to the model of the start at the pace seen in them."""
        anchors_us = _predicted(self._start, _REFERENCE)
        ratios = cells.times_us / _predicted(self._start, cells.features)
        return fit(
            np.concatenate([cells.features, _REFERENCE]),
            np.concatenate([cells.times_us, _weighted_median(ratios, cells.weights) * anchors_us]),
            np.concatenate([cells.weights, np.full(len(_REFERENCE), _ANCHOR)]),
        )

    def _keep(self, newest: list[tuple[F64, float]], steps: _Steps) -> None:
        """Sort steps into their cells; forget those into which nothing has come for long, and the stalest
        when they are many."""
        ratios = (steps.times_us / _predicted(self._start, steps.features)).tolist()
        number = self._num_steps - len(newest)
        for ratio, (features, took_us) in zip(ratios, newest, strict=True):
            number += 1
            cell = self._cells.setdefault(_kind(features), _Cell())
            cell.steps.append((ratio, features, took_us))
            cell.last = number
        stalest = sorted(self._cells, key=lambda kind: self._cells[kind].last)
        for at, kind in enumerate(stalest):
            is_old = self._cells[kind].last < self._num_steps - _FORGET_AFTER
            if is_old or len(stalest) - at > _MAX_CELLS:
                del self._cells[kind]


def coefficients(cost: StepCost) -> F64:
    """float64 [4]: what the features of a step (:attr:`StepShape.features`) are multiplied with."""
    return np.array([cost.base_us, cost.per_sequence_us, cost.per_prefill_token_us, cost.per_kv_token_us])


def _kind(features: F64) -> tuple[int, ...]:
    """Steps of one kind differ by less than 4 in everything."""
    _, *sizes = features.tolist()
    return tuple((int(size).bit_length() + 1) // 2 for size in sizes)


def _predicted(cost: F64, features: F64) -> F64:
    return np.maximum(features @ cost, 1e-3)


def _is_possible(cost: F64) -> bool:
    """Steps take time, and less of it than a message may say."""
    return bool(np.isfinite(cost).all() and cost.min() >= 0 and 0 < cost.max() <= 1e9)


def _weighted_median(values: F64, weights: F64) -> float:
    order = np.argsort(values)
    at = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)
    return float(values[order][at])
