"""Ids on a GPU, in Triton: the likeliest of each row of logits, and ids of the step before in a step's rows.

In torch each is a handful of passes, and as many launches, in every step. ``TRITON_INTERPRET=1`` runs them on
the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 32  # of a row, so that one row alone keeps more than one multiprocessor busy
_TILE = 2048
_ALIGNMENT = 64  # elements at which parts begin, so that loads are wide
_ROWS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_parts(  # type: ignore[no-untyped-def]
    logits, values, ids, size, part_size, PARTS: tl.constexpr, TILE: tl.constexpr
):
    NO_ID: tl.constexpr = 0x7FFFFFFF
    row = logits + tl.program_id(0).to(tl.int64) * size
    start = tl.program_id(1) * part_size
    end = tl.minimum(start + part_size, size)
    best = tl.full([TILE], -float("inf"), tl.float32)
    best_id = tl.full([TILE], NO_ID, tl.int32)
    num_bad = tl.zeros([TILE], tl.int32)
    for at in range(start, end, TILE):
        token_id = at + tl.arange(0, TILE)
        is_id = token_id < end
        value = tl.load(row + token_id, mask=is_id, other=0.0).to(tl.float32)
        is_finite = tl.abs(value) < float("inf")  # false for a NaN
        num_bad += (is_id & (is_finite == 0)).to(tl.int32)
        is_better = is_id & (value > best)
        best = tl.where(is_better, value, best)
        best_id = tl.where(is_better, token_id, best_id)
    top = tl.max(best, 0)
    found = tl.min(tl.where(best == top, best_id, NO_ID), 0)
    is_bad = tl.sum(num_bad, 0) > 0
    out = tl.program_id(0) * PARTS + tl.program_id(1)
    tl.store(values + out, tl.where(is_bad, 0.0, top))
    tl.store(ids + out, tl.where(is_bad, -1, found))


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_row(values, ids, out, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    NO_ID: tl.constexpr = 0x7FFFFFFF
    row = tl.program_id(0)
    part = row * PARTS + tl.arange(0, PARTS)
    value = tl.load(values + part)
    token_id = tl.load(ids + part)
    found = tl.min(tl.where(value == tl.max(value, 0), token_id, NO_ID), 0)
    tl.store(out + row, tl.where(tl.min(token_id, 0) < 0, -1, found).to(tl.int64))


def part_size(vocab_size: int) -> int:
    """Ids of one of the ``PARTS`` of a row; the last ones may have fewer, or none."""
    return -(-vocab_size // (PARTS * _ALIGNMENT)) * _ALIGNMENT


def best_of_parts(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each part of each row of ``logits`` (float [n, vocab], contiguous), float32 [n, PARTS],
    and its id, int32 [n, PARTS], the lowest of several: 0 and -1 for a part that has a NaN or an infinity."""
    num_rows, size = logits.shape
    values = torch.empty(num_rows, PARTS, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, PARTS, dtype=torch.int32, device=logits.device)
    _best_of_parts[(num_rows, PARTS)](logits, values, ids, size, part_size(size), PARTS=PARTS, TILE=_TILE)
    return values, ids


def likeliest_of_rows(logits: Tensor) -> Tensor:
    """int64 [n]: the id of the largest of each row of ``logits`` (float [n, vocab], contiguous), the lowest
    of several; -1 for a row that has a NaN or an infinity."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        _best_of_row[(len(logits),)](*best_of_parts(logits), out, PARTS=PARTS, num_warps=1)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _put_known_ids(token_ids, previous_ids, num_rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token_id = tl.load(token_ids + row, mask=row < num_rows, other=0)
    is_late = token_id < 0
    found = tl.load(previous_ids + (-1 - token_id), mask=is_late, other=0)
    tl.store(token_ids + row, tl.maximum(found, 0).to(token_ids.dtype.element_ty), mask=is_late)


def put_known_ids(token_ids: Tensor, previous_ids: Tensor) -> None:
    """:func:`~parrot.kernels.ops.known_ids` in place: ``token_ids`` int32 [T], ``previous_ids`` int64 [r]."""
    num_rows = len(token_ids)
    _put_known_ids[(triton.cdiv(num_rows, _ROWS),)](token_ids, previous_ids, num_rows, ROWS=_ROWS)
