"""Measuring what a step costs, as a linear function that the scheduler can read (wire.CostModel)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..wire import CostModel
from .admission import num_blocks_for
from .batch import BLOCK_SIZE, StepBatch
from .runner import ModelRunner, Work

F64 = npt.NDArray[np.float64]
BUDGET_S = 2.0  # for measuring at start
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of ``batch`` sequences that each compute ``new_tokens`` on top of ``cached_tokens``."""

    batch: int
    new_tokens: int
    cached_tokens: int

    @property
    def length(self) -> int:
        """Tokens of each sequence after the step."""
        return self.cached_tokens + self.new_tokens

    @property
    def features(self) -> tuple[float, float, float, float]:
        """What the four coefficients of the cost model are multiplied with."""
        prefill = self.batch * self.new_tokens if self.new_tokens > 1 else 0
        kv_tokens = self.batch * self.length
        return 1.0, float(self.batch), float(prefill), float(kv_tokens)


def calibrate(
    runner: ModelRunner, *, max_batch_size: int, max_batch_tokens: int, budget_s: float = BUDGET_S
) -> CostModel:
    """Time steps of several shapes on an idle engine and fit the cost model; about ``budget_s`` seconds.

    Writes into the KV cache, so it has to run before the first call.
    """
    deadline = time.perf_counter() + budget_s
    shapes: list[StepShape] = []
    times_us: list[float] = []
    for shape in _shapes(runner, max_batch_size, max_batch_tokens):
        if len(shapes) >= 4 and time.perf_counter() > deadline:
            break
        shapes.append(shape)
        times_us.append(_time_step(runner, shape, deadline))
    features = np.array([shape.features for shape in shapes])
    base, per_sequence, per_prefill, per_kv = fit(features, np.array(times_us)).tolist()
    return CostModel(
        base_us=base,
        per_sequence_us=per_sequence,
        per_prefill_token_us=per_prefill,
        per_kv_token_us=per_kv,
        capacity_tokens=runner.num_blocks * BLOCK_SIZE,
        num_blocks=runner.num_blocks,
    )


def expected_us(cost: CostModel, work: Sequence[Work]) -> float:
    """What a step takes by the cost model, in microseconds; a prefix that several calls share counts for
    each of them, so that a step that reads it once is expected to take longer than it does."""
    prefill = sum(w.count for w in work if w.count > 1)
    kv_tokens = sum(w.call.num_computed + w.count for w in work)
    return (
        cost.base_us
        + cost.per_sequence_us * len(work)
        + cost.per_prefill_token_us * prefill
        + cost.per_kv_token_us * kv_tokens
    )


def fit(features: F64, times_us: F64, weights: F64 | None = None) -> F64:
    """Non-negative least squares of the relative error: float64 [k] for features [n, k], times [n] and what
    each row's error is multiplied with [n].

    Tries every set of coefficients that may be above zero, which is exact and for four of them quick: the
    rows are first brought down to k + 1 that give the same errors.
    """
    rows = np.column_stack([features / times_us[:, None], np.ones(len(times_us))])
    if weights is not None:
        rows *= weights[:, None]
    reduced = np.linalg.qr(rows).R
    scaled, target = reduced[:, :-1], reduced[:, -1]
    best, best_error = np.zeros(features.shape[1]), float("inf")
    for columns in _subsets(features.shape[1]):
        solution = np.zeros(features.shape[1])
        solution[columns] = np.linalg.lstsq(scaled[:, columns], target, rcond=None)[0]
        error = float(np.square(scaled @ solution - target).sum())
        if solution.min() >= 0 and error < best_error:
            best, best_error = solution, error
    return best


def _subsets(n: int) -> Iterator[list[int]]:
    for size in range(1, n + 1):
        yield from map(list, itertools.combinations(range(n), size))


def _shapes(runner: ModelRunner, max_batch_size: int, max_batch_tokens: int) -> list[StepShape]:
    """Shapes that this engine can run, the most telling first; large steps last, for which only a fast
    engine has the time: few rows on short contexts say little of what these cost there."""
    small = (
        StepShape(1, 1, 31),
        StepShape(1, min(128, max_batch_tokens), 0),
        StepShape(min(16, max_batch_size), 1, 31),
        StepShape(min(8, max_batch_size), 1, 1023),
        StepShape(1, min(32, max_batch_tokens), 0),
        StepShape(1, 1, 2047),
        StepShape(min(4, max_batch_size), 1, 31),
        StepShape(1, min(128, max_batch_tokens), 1024),
        StepShape(min(32, max_batch_size), 1, 255),
    )
    large = (
        StepShape(max_batch_size, 1, 511),
        StepShape(-(-max_batch_size // 4), 1, 2047),
        StepShape(min(4, max_batch_tokens // 1024), 1024, 0),
    )
    longest = min(runner.model.config.max_positions, runner.num_blocks * BLOCK_SIZE)
    cut = [_cut(shape, longest) for shape in small]
    # Unlike small ones, large shapes are to have blocks of their own.
    cut += [
        _cut(shape, min(longest, runner.num_blocks // shape.batch * BLOCK_SIZE))
        for shape in large
        if shape.batch
    ]
    return list(dict.fromkeys(shape for shape in cut if shape is not None))


def _cut(shape: StepShape, longest: int) -> StepShape | None:
    """The shape with so many tokens a sequence at most; None where its new ones are more."""
    if shape.new_tokens > longest:
        return None
    return StepShape(shape.batch, shape.new_tokens, min(shape.cached_tokens, longest - shape.new_tokens))


def _time_step(runner: ModelRunner, shape: StepShape, deadline: float) -> float:
    """Microseconds of the fastest of a few runs, after one to warm up; one run when time is short."""
    batch = _batch(runner, shape)
    best = _run(runner, batch)
    for _ in range(_REPEATS):
        if time.perf_counter() > deadline:
            break
        best = min(best, _run(runner, batch))
    return best


def _run(runner: ModelRunner, batch: StepBatch) -> float:
    started = time.perf_counter()
    runner.compute(batch)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    return (time.perf_counter() - started) * 1e6


def _batch(runner: ModelRunner, shape: StepShape) -> StepBatch:
    """The step as a batch. Sequences take blocks in turn; a small pool makes them share, which costs the
    same."""
    length = shape.length
    per_sequence = num_blocks_for(length)
    blocks = torch.arange(shape.batch * per_sequence).remainder(runner.num_blocks)
    tables = blocks.reshape(shape.batch, per_sequence)
    positions = torch.arange(shape.cached_tokens, length).repeat(shape.batch)
    rows = torch.arange(shape.batch).repeat_interleave(shape.new_tokens)
    ends = torch.arange(1, shape.batch + 1) * shape.new_tokens
    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions,
        slots=tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start=[0, *ends.tolist()],
        seq_lens=[length] * shape.batch,
        block_tables=tables,
        logit_rows=ends - 1,
    )
