"""Causal attention of chunks of prefill over a paged cache, in Triton.

A program computes one tile of a chunk's rows for one query head: it walks over the tiles of K and V that lie
before the end of its rows, through the block table, with the online softmax in float32. The tiles of all
chunks of a step are one launch. ``TRITON_INTERPRET=1`` runs it on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl
from torch import Tensor

I32 = npt.NDArray[np.int32]
BLOCK_SIZE = 16
ROWS = 64  # of queries in a tile


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The tiles of a step's chunks, on the device; the same for every layer."""

    tiles: Tensor  # int32 [num_tiles, 4], see prefill_tiles
    block_tables: Tensor  # int32 [>= n, max_blocks]


def prefill_tiles(
    query_start: Sequence[int], seq_lens: Sequence[int], chunks: Sequence[int], first_table: int
) -> I32:
    """int32 [num_tiles, 4]: row of the block tables, first row of the step, end of the chunk's rows, position
    of the first row. Of the sequences ``chunks`` of a step (:class:`~parrot.engine.batch.StepBatch`), whose
    tables are the rows from ``first_table`` on; the tiles with the most to read first, so that the last to
    start are short."""
    tiles = []
    for table, i in enumerate(chunks, first_table):
        start, end = query_start[i], query_start[i + 1]
        before = seq_lens[i] - (end - start)
        tiles += [(table, row, end, before + row - start) for row in range(start, end, ROWS)]
    tiles.sort(key=lambda tile: -tile[3])
    return np.array(tiles, dtype=np.int32).reshape(-1, 4)


@triton.jit  # type: ignore[untyped-decorator]
def _prefill(  # type: ignore[no-untyped-def]
    query,
    key_cache,
    value_cache,
    output,
    tiles,
    block_tables,
    scale_log2,
    max_blocks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 4
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    table = block_tables + tl.load(tile).to(tl.int64) * max_blocks
    first_row = tl.load(tile + 1)
    end_row = tl.minimum(tl.load(tile + 2), first_row + ROWS)
    first_position = tl.load(tile + 3)
    row = first_row + tl.arange(0, ROWS)
    is_row = row < end_row
    position = first_position + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    is_dim = dims < HEAD_DIM
    at = ((row.to(tl.int64) * HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
    is_query = is_row[:, None] & is_dim[None, :]
    q = tl.load(query + at, mask=is_query, other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED], tl.float32)
    end = first_position + end_row - first_row
    for start in range(0, end, TILE):
        token = start + tl.arange(0, TILE)
        is_token = token < end
        block = tl.load(table + token // BLOCK, mask=is_token, other=0).to(tl.int64)
        slot = (block * BLOCK + token % BLOCK) * KV_HEADS + kv_head
        cached = (slot * HEAD_DIM)[:, None] + dims[None, :]
        is_cached = is_token[:, None] & is_dim[None, :]
        k = tl.load(key_cache + cached, mask=is_cached, other=0.0)
        v = tl.load(value_cache + cached, mask=is_cached, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        scores = tl.where(token[None, :] <= position[:, None], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        factor = tl.exp2(top - new_top)
        total = total * factor + tl.sum(weights, 1)
        result = result * factor[:, None] + tl.dot(weights.to(v.dtype), v)
        top = new_top
    tl.store(output + at, (result / total[:, None]).to(output.dtype.element_ty), mask=is_query)


def paged_prefill(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, plan: PrefillPlan, scale: float
) -> None:
    """Fill the rows of ``output`` [T, heads, head_dim] that belong to the plan's chunks.

    ``query`` [T, heads, head_dim]; caches [num_blocks, 16, kv_heads, head_dim], in which the step's keys and
    values are already written; all contiguous and of one dtype. Slots past the end of a sequence may hold
    anything, NaN too.
    """
    _, heads, head_dim = query.shape
    _prefill[(len(plan.tiles), heads)](
        query,
        key_cache,
        value_cache,
        output,
        plan.tiles,
        plan.block_tables,
        scale * math.log2(math.e),
        plan.block_tables.stride(0),
        HEADS=heads,
        KV_HEADS=key_cache.shape[2],
        HEAD_DIM=head_dim,
        PADDED=max(16, triton.next_power_of_2(head_dim)),
        ROWS=ROWS,
        TILE=64,
        BLOCK=BLOCK_SIZE,
        num_warps=4,
        num_stages=3,
    )
