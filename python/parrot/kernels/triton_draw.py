"""Drawing ids on a GPU, in Triton: by temperature, min-p, top-k and top-p, without a sort.

The weight of an id is exp((logit - largest) / temperature), float32; sums of tiles are float64. A row depends
on itself alone, and nothing waits for the device. ``TRITON_INTERPRET=1`` runs it on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 8192
_LOG2_E = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _weights(source, start, top, scale, least, vocab_size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the ids from ``start`` on; 0 for those that min-p leaves out."""
    column = start + tl.arange(0, TILE)
    logit = tl.load(source + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
    weight = tl.exp2((logit - top) * scale)
    return tl.where(weight >= least, weight, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _count_and_sum(  # type: ignore[no-untyped-def]
    source, bound, top, scale, least, vocab_size, TILE: tl.constexpr
):
    """How many weights are at least ``bound``, and their sum."""
    count = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, TILE):
        weight = _weights(source, start, top, scale, least, vocab_size, TILE)
        is_in = (weight >= bound) & (weight > 0.0)
        count += tl.sum(is_in.to(tl.int32), 0)
        total += tl.sum(tl.where(is_in, weight, 0.0), 0).to(tl.float64)
    return count, total


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(  # type: ignore[no-untyped-def]
    logits,
    rows,
    likeliest,
    scales,
    leasts,
    top_ks,
    top_ps,
    bounds,
    num_equals,
    vocab_size,
    TILE: tl.constexpr,
):
    """The least weight that top-k and top-p keep, and how many of those that are equal to it. Positive floats
    are ordered as their bits are: a bound is found bit by bit, the highest first."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    source = logits + row * vocab_size
    top = tl.load(source + tl.maximum(tl.load(likeliest + row), 0)).to(tl.float32)
    scale, least = tl.load(scales + i), tl.load(leasts + i)
    top_k, top_p = tl.load(top_ks + i), tl.load(top_ps + i)
    k_bits = tl.zeros([], tl.int32)
    if top_k < vocab_size:
        for bit in range(30):
            candidate = k_bits | (1 << (29 - bit))
            bound = candidate.to(tl.float32, bitcast=True)
            count, _sum = _count_and_sum(source, bound, top, scale, least, vocab_size, TILE)
            k_bits = tl.where(count >= top_k, candidate, k_bits)
    k_bound = k_bits.to(tl.float32, bitcast=True)
    above, sum_above = _count_and_sum(
        source, (k_bits + 1).to(tl.float32, bitcast=True), top, scale, least, vocab_size, TILE
    )
    k_equals = tl.maximum(top_k - above, 0).to(tl.int32)
    bits, equals = k_bits, k_equals
    if top_p < 1.0:
        at_k, _sum_at_k = _count_and_sum(source, k_bound, top, scale, least, vocab_size, TILE)
        kept = sum_above + tl.minimum(k_equals, at_k - above).to(tl.float64) * k_bound.to(tl.float64)
        target = top_p * kept
        p_bits = tl.zeros([], tl.int32)
        for bit in range(30):
            candidate = p_bits | (1 << (29 - bit))
            bound = candidate.to(tl.float32, bitcast=True)
            _count, total = _count_and_sum(source, bound, top, scale, least, vocab_size, TILE)
            p_bits = tl.where(total >= target, candidate, p_bits)
        if p_bits >= k_bits:
            _count_above, total_above = _count_and_sum(
                source, (p_bits + 1).to(tl.float32, bitcast=True), top, scale, least, vocab_size, TILE
            )
            value = p_bits.to(tl.float32, bitcast=True).to(tl.float64)
            needed = tl.maximum(tl.ceil((target - total_above) / value), 1.0).to(tl.int32)
            equals = tl.where(p_bits == k_bits, tl.minimum(needed, k_equals), needed)
            bits = p_bits
    tl.store(bounds + i, bits.to(tl.float32, bitcast=True))
    tl.store(num_equals + i, equals)


@triton.jit  # type: ignore[untyped-decorator]
def _kept(  # type: ignore[no-untyped-def]
    source, start, top, scale, least, bound, num_equal, equals_before, vocab_size, TILE: tl.constexpr
):
    """Weights of a tile, 0 for what is not kept; how many ids up to its end are equal to the bound: of those
    the lowest are kept."""
    weight = _weights(source, start, top, scale, least, vocab_size, TILE)
    is_equal = (weight == bound) & (weight > 0.0)
    place = equals_before + tl.cumsum(is_equal.to(tl.int32), 0)
    weight = tl.where((weight > bound) | (is_equal & (place <= num_equal)), weight, 0.0)
    return weight, equals_before + tl.sum(is_equal.to(tl.int32), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits, rows, likeliest, scales, leasts, bounds, num_equals, targets, out, vocab_size, TILE: tl.constexpr
):
    i = tl.program_id(0)
    row = tl.load(rows + i)
    best = tl.load(likeliest + row)
    source = logits + row * vocab_size
    top = tl.load(source + tl.maximum(best, 0)).to(tl.float32)
    scale, least = tl.load(scales + i), tl.load(leasts + i)
    bound, num_equal = tl.load(bounds + i), tl.load(num_equals + i)
    total = tl.zeros([], tl.float64)
    equals = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, TILE):
        weight, equals = _kept(source, start, top, scale, least, bound, num_equal, equals, vocab_size, TILE)
        total += tl.sum(weight, 0).to(tl.float64)
    target = tl.load(targets + i) * total
    before = tl.zeros([], tl.float64)
    equals = tl.zeros([], tl.int32)
    found = best  # of rounding: nothing passes the target
    is_found = before > target
    for start in range(0, vocab_size, TILE):
        weight, equals = _kept(source, start, top, scale, least, bound, num_equal, equals, vocab_size, TILE)
        after = before + tl.sum(weight, 0).to(tl.float64)
        if (after > target) & (is_found == 0):
            column = start + tl.arange(0, TILE)
            sums = before + tl.cumsum(weight, 0).to(tl.float64)
            # The first id whose sum passes the target; of rounding, the last that has a weight at all.
            first = tl.min(tl.where((sums > target) & (weight > 0.0), column, vocab_size), 0)
            last = tl.max(tl.where(weight > 0.0, column, -1), 0)
            found = tl.where(first < vocab_size, first, last).to(tl.int64)
            is_found = after > target
        before = after
    tl.store(out + i, tl.where(best < 0, best, found))


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """Of the rows that are drawn, on their device. ``top_k`` None: neither top-k nor top-p."""

    rows: Tensor  # int64 [r], which of the batch
    temperature: Tensor  # float64 [r]
    min_p: Tensor | None  # float64 [r] in [0, 1]; None: off
    top_k: Tensor | None  # int64 [r], at least 1
    top_p: Tensor  # float64 [r] in (0, 1]


def draw(logits: Tensor, likeliest: Tensor, targets: Tensor, parameters: DrawParameters) -> Tensor:
    """int64 [r]: of each row of ``parameters`` the id at which the sum of the weights, in the order of ids,
    passes its target, a share of all; -1 where ``likeliest`` (int64 [n]) is.

    ``logits`` [n, vocab], contiguous; ``targets`` float64 [r] in [0, 1). What min-p, top-k and top-p leave
    out has no weight, as in :func:`~parrot.engine.truncation.likeliest`.
    """
    rows, vocab_size = parameters.rows, logits.shape[1]
    out, size = torch.empty_like(rows), len(rows)
    if size == 0:
        return out
    scales = (_LOG2_E / parameters.temperature).float()
    leasts = torch.zeros_like(scales) if parameters.min_p is None else parameters.min_p.float()
    bounds = torch.zeros_like(scales)
    num_equals = torch.zeros(size, dtype=torch.int32, device=rows.device)
    shared = (logits, rows, likeliest, scales, leasts)
    options = {"TILE": _TILE, "num_warps": 16}
    if parameters.top_k is not None:
        limits = (parameters.top_k, parameters.top_p)
        _bounds[(size,)](*shared, *limits, bounds, num_equals, vocab_size, **options)
    _draw[(size,)](*shared, bounds, num_equals, targets, out, vocab_size, **options)
    return out


def compile_draws(logits: Tensor, likeliest: Tensor) -> None:
    """Draw once in every way, from ``logits`` [n, vocab] as steps have them, so that no request waits for the
    compiler."""
    row = torch.zeros(1, dtype=torch.int64, device=logits.device)
    one = torch.ones(1, dtype=torch.float64, device=logits.device)
    for top_k in (None, row + 1):
        draw(logits, likeliest, 0 * one, DrawParameters(row, one, None, top_k, 0.5 * one))
