"""Choosing ids on a GPU, in Triton: the likeliest, or drawn by temperature, min-p, top-k and top-p without a
sort.

The weight of an id is exp((logit - largest) / temperature), float32; sums of tiles are float64. A row depends
on itself alone, what is launched on the number of rows alone, and nothing waits for the device: steps can be
recorded with it. ``TRITON_INTERPRET=1`` runs it on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draws import DRAW_SIZE
from .triton_ids import PARTS, best_of_parts, part_size

_TILE = 8192  # of one program that looks at a whole row
_PART_TILE = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _weights(source, start, end, top, scale, least, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the ids from ``start`` on, up to ``end``; 0 for those that min-p leaves out."""
    column = start + tl.arange(0, TILE)
    logit = tl.load(source + column, mask=column < end, other=-float("inf")).to(tl.float32)
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
        weight = _weights(source, start, vocab_size, top, scale, least, TILE)
        is_in = (weight >= bound) & (weight > 0.0)
        count += tl.sum(is_in.to(tl.int32), 0)
        total += tl.sum(tl.where(is_in, weight, 0.0), 0).to(tl.float64)
    return count, total


@triton.jit  # type: ignore[untyped-decorator]
def _least_kept(  # type: ignore[no-untyped-def]
    source, top, scale, least, top_k, top_p, vocab_size, TILE: tl.constexpr
):
    """The bits of the least weight that top-k and top-p keep, and how many of those that are equal to it.
    Positive floats are ordered as their bits are: a bound is found bit by bit, the highest first."""
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
    return bits, equals


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(  # type: ignore[no-untyped-def]
    logits,
    values,
    ids,
    draw_doubles,
    draw_longs,
    draw_floats,
    likeliest,
    bounds,
    num_equals,
    vocab_size,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of each row the likeliest id; if top-k or top-p leave some out, the least weight that they keep."""
    NO_ID: tl.constexpr = 0x7FFFFFFF
    row = tl.program_id(0).to(tl.int64)
    part = row * PARTS + tl.arange(0, PARTS)
    value, token_id = tl.load(values + part), tl.load(ids + part)
    top = tl.max(value, 0)
    best = tl.min(tl.where(value == top, token_id, NO_ID), 0)
    tl.store(likeliest + row, tl.where(tl.min(token_id, 0) < 0, -1, best).to(tl.int64))
    top_p, top_k = tl.load(draw_doubles + 4 * row + 1), tl.load(draw_longs + 4 * row + 2)
    scale, least = tl.load(draw_floats + 8 * row + 6), tl.load(draw_floats + 8 * row + 7)
    bits, equals = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    if (scale > 0.0) & ((top_k < vocab_size) | (top_p < 1.0)):
        source = logits + row * vocab_size
        bits, equals = _least_kept(source, top, scale, least, top_k, top_p, vocab_size, TILE)
    tl.store(bounds + row, bits.to(tl.float32, bitcast=True))
    tl.store(num_equals + row, equals)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_parts(  # type: ignore[no-untyped-def]
    logits,
    draw_floats,
    likeliest,
    bounds,
    sums,
    equals,
    vocab_size,
    part_size,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of each part of a row that is drawn: the sum of the weights above the bound, how many equal it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale, least = tl.load(draw_floats + 8 * row + 6), tl.load(draw_floats + 8 * row + 7)
    if scale > 0.0:
        source = logits + row * vocab_size
        top = tl.load(source + tl.maximum(tl.load(likeliest + row), 0)).to(tl.float32)
        bound = tl.load(bounds + row)
        start = part * part_size
        end = tl.minimum(start + part_size, vocab_size)
        total, count = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
        for at in range(start, end, TILE):
            weight = _weights(source, at, end, top, scale, least, TILE)
            total += tl.sum(tl.where(weight > bound, weight, 0.0), 0).to(tl.float64)
            count += tl.sum(((weight == bound) & (weight > 0.0)).to(tl.int32), 0)
        tl.store(sums + row * PARTS + part, total)
        tl.store(equals + row * PARTS + part, count)


@triton.jit  # type: ignore[untyped-decorator]
def _find_in_part(  # type: ignore[no-untyped-def]
    source, start, end, top, scale, least, bound, num_equal, before, target, TILE: tl.constexpr
):
    """The first id of a part at which the sum of what is kept passes ``target``, ``before`` being that of the
    parts before and ``num_equal`` how many of those equal to the bound are kept, the lowest; of rounding, the
    last that is kept."""
    NO_ID: tl.constexpr = 0x7FFFFFFF
    found, last = tl.full([], NO_ID, tl.int32), tl.full([], -1, tl.int32)
    seen = tl.zeros([], tl.int32)
    for at in range(start, end, TILE):
        weight = _weights(source, at, end, top, scale, least, TILE)
        is_equal = (weight == bound) & (weight > 0.0)
        place = seen + tl.cumsum(is_equal.to(tl.int32), 0)
        seen += tl.sum(is_equal.to(tl.int32), 0)
        weight = tl.where((weight > bound) | (is_equal & (place <= num_equal)), weight, 0.0)
        column = at + tl.arange(0, TILE)
        passes = (before + tl.cumsum(weight, 0).to(tl.float64) > target) & (weight > 0.0)
        found = tl.minimum(found, tl.min(tl.where(passes, column, NO_ID), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, column, -1), 0))
        before += tl.sum(weight, 0).to(tl.float64)
    return tl.where(found == NO_ID, last, found)


@triton.jit  # type: ignore[untyped-decorator]
def _find(  # type: ignore[no-untyped-def]
    logits,
    draw_doubles,
    draw_floats,
    likeliest,
    bounds,
    num_equals,
    sums,
    equals,
    out,
    vocab_size,
    part_size,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The id of each row: the part in which the sum passes the target, then the place in it."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.load(likeliest + row)
    scale, least = tl.load(draw_floats + 8 * row + 6), tl.load(draw_floats + 8 * row + 7)
    chosen = best
    if (scale > 0.0) & (best >= 0):
        source = logits + row * vocab_size
        top = tl.load(source + best).to(tl.float32)
        bound, num_equal = tl.load(bounds + row), tl.load(num_equals + row)
        part = tl.arange(0, PARTS)
        count = tl.load(equals + row * PARTS + part)
        equals_before = tl.cumsum(count, 0) - count
        num_kept = tl.minimum(tl.maximum(num_equal - equals_before, 0), count)
        total = tl.load(sums + row * PARTS + part) + num_kept.to(tl.float64) * bound.to(tl.float64)
        passed = tl.cumsum(total, 0)
        target = tl.load(draw_doubles + 4 * row) * tl.max(passed, 0)
        first = tl.min(tl.where((passed > target) & (total > 0.0), part, PARTS), 0)
        last = tl.max(tl.where(total > 0.0, part, 0), 0)  # of rounding: nothing passes the target
        place = tl.where(first < PARTS, first, last)
        before = tl.sum(tl.where(part == place - 1, passed, 0.0), 0)
        num_equal -= tl.sum(tl.where(part == place, equals_before, 0), 0)
        start = place * part_size
        end = tl.minimum(start + part_size, vocab_size)
        chosen = _find_in_part(
            source, start, end, top, scale, least, bound, num_equal, before, target, TILE
        ).to(tl.int64)
    tl.store(out + row, chosen)


def draw(logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [n] each: the id that each row is to have, and its likeliest, which it has if it is not drawn; -1
    for a row that has a NaN or an infinity.

    ``logits`` float [n, vocab], contiguous; ``draws`` int32 [8 n], :data:`~.draws.DRAW` of each row. The
    drawn id is the one at which the sum of the weights, in the order of ids, passes the target, a share of
    all; what min-p, top-k and top-p leave out has no weight (:func:`~parrot.engine.truncation.likeliest`).
    """
    num_rows, vocab_size = logits.shape

    def empty(dtype: torch.dtype, *more: int) -> Tensor:
        return torch.empty(num_rows, *more, dtype=dtype, device=logits.device)

    likeliest, out = empty(torch.int64), empty(torch.int64)
    if num_rows == 0:
        return out, likeliest
    values, ids = best_of_parts(logits)
    bounds, num_equals = empty(torch.float32), empty(torch.int32)
    sums, equals = empty(torch.float64, PARTS), empty(torch.int32, PARTS)
    draws = draws[: num_rows * DRAW_SIZE]
    doubles, longs, floats = (draws.view(dtype) for dtype in (torch.float64, torch.int64, torch.float32))
    found = (likeliest, bounds, num_equals)
    _bounds[(num_rows,)](
        logits, values, ids, doubles, longs, floats, *found, vocab_size, PARTS=PARTS, TILE=_TILE, num_warps=16
    )
    sizes = {"vocab_size": vocab_size, "part_size": part_size(vocab_size), "PARTS": PARTS, "TILE": _PART_TILE}
    _sum_parts[(num_rows, PARTS)](logits, floats, likeliest, bounds, sums, equals, **sizes)
    _find[(num_rows,)](logits, doubles, floats, *found, sums, equals, out, **sizes)
    return out, likeliest
