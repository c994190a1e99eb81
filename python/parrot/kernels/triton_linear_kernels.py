"""Kernels of :mod:`.triton_linear`: a product with one row, and one with up to 16 rows on tensor cores.

Both may start before the kernel ahead of them ends (``EARLY``); it must not write the weight.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]
def _weight_rows(  # type: ignore[no-untyped-def]
    weight, SIZE: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr, GATED: tl.constexpr
):
    """Numbers of this program's rows of the weight, and where they begin: [TILE] each. A gated program has
    the rows of gate of some columns of the result, then those of up."""
    COLUMNS: tl.constexpr = TILE // 2 if GATED else TILE
    inside = tl.arange(0, TILE)
    row = tl.minimum(tl.program_id(0) * COLUMNS + inside % COLUMNS, SIZE - 1) + inside // COLUMNS * SIZE
    return row, weight + row.to(tl.int64) * DEPTH


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    product,
    weight_row,
    bias,
    out,
    num_rows,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """What follows the product [ROWS, TILE] of this program; its first rows are stored."""
    COLUMNS: tl.constexpr = TILE // 2 if GATED else TILE
    if HAS_BIAS:
        product += tl.load(bias + weight_row).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(product, (ROWS, 2, COLUMNS)), (0, 2, 1)))
        product = gate * tl.sigmoid(gate) * up
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = out + row[:, None] * SIZE + column[None, :]
    is_stored = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    if ADDS:
        product += tl.load(at, mask=is_stored, other=0.0).to(tl.float32)
    tl.store(at, product.to(out.dtype.element_ty), mask=is_stored)


@triton.jit  # type: ignore[untyped-decorator]
def row_product(  # type: ignore[no-untyped-def]
    x,
    gain,
    weight,
    bias,
    out,
    eps,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row: the weight comes straight into registers, few of its rows to a program."""
    weight_row, weights = _weight_rows(weight, SIZE, DEPTH, TILE, GATED)
    step = tl.arange(0, STEP)[None, :]
    w = tl.load(weights[:, None] + step, mask=step < DEPTH, other=0.0, cache_modifier=".cg")
    if EARLY:  # with the first columns of the weight on their way
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((TILE, STEP), tl.float32)
    squares = tl.zeros((1, STEP), tl.float32)
    for start in tl.static_range(0, DEPTH, STEP):
        depth = start + step
        if start > 0:
            w = tl.load(weights[:, None] + depth, mask=depth < DEPTH, other=0.0, cache_modifier=".cg")
        value = tl.load(x + depth, mask=depth < DEPTH, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += value * value
            value *= tl.load(gain + depth, mask=depth < DEPTH, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * value
    product = tl.sum(total, 1)[None, :]
    if HAS_NORM:
        product *= 1.0 / tl.sqrt(tl.sum(squares, 1) / DEPTH + eps)[:, None]
    _store(product, weight_row, bias, out, 1, SIZE, 1, TILE, GATED, HAS_BIAS, ADDS)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_parts(  # type: ignore[no-untyped-def]
    total, parts, arrivals, TILE: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr
):
    """Leave ``total`` for the last program of this tile, and if this is the last one, what all left, added in
    order; whether it is. The counter is zero again then, for the next launch."""
    tile = tl.program_id(0)
    at = tl.arange(0, TILE)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    first = parts + tile * SPLIT * TILE * ROWS + at
    tl.store(first + tl.program_id(1) * TILE * ROWS, total)
    tl.debug_barrier()  # all threads' parts are stored before one thread counts them
    is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if is_last:
        total = tl.zeros((TILE, ROWS), tl.float32)
        for part in tl.static_range(SPLIT):
            total += tl.load(first + part * TILE * ROWS, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    return total, is_last


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def rows_product(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    parts,
    arrivals,
    num_rows,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Up to ``ROWS`` rows: the weight is the left operand of tensor cores, ``x`` the right one. ``SPLIT``
    programs share the sum of a tile."""
    weight_row, weights = _weight_rows(weight, SIZE, DEPTH, TILE, GATED)
    part = tl.program_id(1)
    begin = part * tl.cdiv(DEPTH, STEP) // SPLIT * STEP
    end = (part + 1) * tl.cdiv(DEPTH, STEP) // SPLIT * STEP
    row = tl.arange(0, ROWS)
    is_row = (row < num_rows)[None, :]
    step = tl.arange(0, STEP)
    total = tl.zeros((TILE, ROWS), tl.float32)
    if EARLY:  # itself it lets nothing start early, which would hold shared memory beside it for nothing
        gdc_wait()
    for start in range(begin, end, STEP):
        depth = start + step
        left = weights[:, None] + depth[None, :]
        right = x + row[None, :] * DEPTH + depth[:, None]
        if DEPTH % STEP == 0:
            w, values = tl.load(left), tl.load(right, mask=is_row, other=0.0)
        else:
            is_inside = depth < DEPTH
            w = tl.load(left, mask=is_inside[None, :], other=0.0)
            values = tl.load(right, mask=is_inside[:, None] & is_row, other=0.0)
        total = tl.dot(w, values, total, input_precision="ieee")
    num_stored = num_rows
    if SPLIT > 1:
        total, is_last = _sum_of_parts(total, parts, arrivals, TILE, ROWS, SPLIT)
        num_stored = tl.where(is_last, num_rows, 0)
    _store(tl.trans(total), weight_row, bias, out, num_stored, SIZE, ROWS, TILE, GATED, HAS_BIAS, ADDS)
