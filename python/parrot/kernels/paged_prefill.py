"""Causal attention of chunks of prefill over a paged cache, in Triton.

A program computes one tile of a chunk's rows for one query head: it walks over the tiles of K and V that lie
before the end of its rows, through the block table, with the online softmax in float32. Tiles that all its
rows see need no comparison and are loaded ahead; the last two or three are masked. The tiles of all chunks of
a step are one launch. ``TRITON_INTERPRET=1`` runs it on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

I32 = npt.NDArray[np.int32]
BLOCK_SIZE = 16
LOW, TALL = 64, 128  # rows of queries in a tile: one height for a step
_TILE = 64  # tokens of K and V
_FULL = 200  # tall programs as long as the longest, which keep an H200 busy
_SECTION = 512  # programs: about two for each that runs at a time
_NARROW = 2**31  # elements of a cache that 32-bit offsets reach; 64-bit ones cost a twentieth


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The tiles of a step's chunks, on the device; the same for every layer."""

    tiles: Tensor  # int32 [num_tiles, 4], see prefill_tiles
    block_tables: Tensor  # int32 [>= n, max_blocks]
    rows: int  # of a tile
    num_tokens: int  # that the chunks attend to, in sum over their sequences


def tile_rows(lengths: Sequence[int], seq_lens: Sequence[int], heads: int) -> int:
    """The height of the tiles of a step for chunks of ``lengths`` rows that end at ``seq_lens`` tokens. A
    tall tile takes as long as one and a half low ones, but what it has past the end of its chunk is lost,
    and the step waits for the longest one where there are too few for the device."""
    low, tall = ([-(-length // rows) for length in lengths] for rows in (LOW, TALL))
    read = sum(n * (end - length / 2) for n, length, end in zip(tall, lengths, seq_lens, strict=True))
    is_full = heads * read >= _FULL * max(seq_lens)
    return TALL if is_full and 3 * sum(tall) <= 2 * sum(low) else LOW


def prefill_tiles(
    query_start: Sequence[int], seq_lens: Sequence[int], chunks: Sequence[int], first_table: int, height: int
) -> I32:
    """int32 [num_tiles, 4]: row of the block tables, first row of the step, end of the chunk's rows, position
    of the first row. Of the sequences ``chunks`` of a step (:class:`~parrot.engine.batch.StepBatch`), whose
    tables are the rows from ``first_table`` on, in tiles of ``height`` rows; the tiles with the most to read
    first, so that the last to start are short."""
    tiles = []
    for table, i in enumerate(chunks, first_table):
        start, end = query_start[i], query_start[i + 1]
        before = seq_lens[i] - (end - start)
        tiles += [(table, row, end, before + row - start) for row in range(start, end, height)]
    tiles.sort(key=lambda tile: -tile[3])
    return np.array(tiles, dtype=np.int32).reshape(-1, 4)


@triton.jit  # type: ignore[untyped-decorator]
def _slots(  # type: ignore[no-untyped-def]
    table, start, end, WIDE: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Of the tokens of a tile: each block is looked up once."""
    number = start // BLOCK + tl.arange(0, TILE // BLOCK)
    block = tl.load(table + number, mask=(number * BLOCK < end) if MASKED else None)
    if WIDE:
        block = block.to(tl.int64)
    return tl.reshape(block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], [TILE])


@triton.jit  # type: ignore[untyped-decorator]
def _visit(  # type: ignore[no-untyped-def]
    state,
    q,
    position,
    keys,
    values,
    table,
    start,
    end,
    scale_log2,
    STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The softmax after the tokens from ``start`` to ``end``. Without a mask all rows see them all."""
    top, total, result = state
    dims = tl.arange(0, q.shape[1])
    for first in tl.range(start, end, TILE, num_stages=1 if MASKED else 3):
        slot = _slots(table, first, end, WIDE, MASKED, TILE, BLOCK)
        cached = (slot * STEP)[:, None] + dims[None, :]
        token = first + tl.arange(0, TILE)
        is_cached = (dims < HEAD_DIM)[None, :]
        if MASKED:
            is_cached = is_cached & (token < end)[:, None]
        k = tl.load(keys + cached, mask=is_cached, other=0.0)
        v = tl.load(values + cached, mask=is_cached, other=0.0)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            scores = tl.where(token[None, :] <= position[:, None], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_top[:, None])
        factor = tl.exp2(top - new_top)
        total = total * factor + tl.sum(weights, 1)
        result = tl.dot(weights.to(v.dtype), v, result * factor[:, None])
        top = new_top
    return top, total, result


@triton.jit(do_not_specialize=["max_blocks"])  # type: ignore[untyped-decorator]
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
    WIDE: tl.constexpr,
):
    tile = tiles + tl.program_id(1) * 4
    head = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
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
    state = top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, PADDED], tl.float32)
    end = first_position + end_row - first_row
    mid = (first_position + 1) // TILE * TILE  # all rows see what lies before it
    keys = key_cache + kv_head * HEAD_DIM
    values = value_cache + kv_head * HEAD_DIM
    STEP: tl.constexpr = KV_HEADS * HEAD_DIM
    state = _visit(
        state, q, position, keys, values, table, 0, mid, scale_log2, STEP, HEAD_DIM, TILE, BLOCK, WIDE, False
    )
    _, total, result = _visit(
        state, q, position, keys, values, table, mid, end, scale_log2, STEP, HEAD_DIM, TILE, BLOCK, WIDE, True
    )
    tl.store(output + at, (result / total[:, None]).to(output.dtype.element_ty), mask=is_query)


@cache
def _max_registers(rows: int, head_dim: int, device: torch.device) -> int:
    """Of a thread. wgmma reads Q, K and V in shared memory, so that a tall tile spills little with half the
    registers of a multiprocessor, and one program computes while another waits; mma.sync needs them."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return 128 if rows == TALL and head_dim <= 128 and is_hopper else 255


def paged_prefill(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, plan: PrefillPlan, scale: float
) -> None:
    """Fill the rows of ``output`` [T, heads, head_dim] that belong to the plan's chunks.

    ``query`` [T, heads, head_dim]; caches [num_blocks, 16, kv_heads, head_dim], in which the step's keys and
    values are already written; all contiguous and of one dtype. Slots past the end of a sequence may hold
    anything, NaN too.
    """
    _, heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    num_tiles = len(plan.tiles)
    # Query heads of a KV head, and as many KV heads as fill the device, run tile by tile and read K and V
    # while they are in its cache; then the next ones.
    sections = math.gcd(kv_heads, 2 ** int(math.log2(max(1, num_tiles * heads // _SECTION))))
    _prefill[(heads // sections, num_tiles, sections)](
        query,
        key_cache,
        value_cache,
        output,
        plan.tiles,
        plan.block_tables,
        scale * math.log2(math.e),
        plan.block_tables.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PADDED=max(16, triton.next_power_of_2(head_dim)),
        ROWS=plan.rows,
        TILE=_TILE,
        BLOCK=BLOCK_SIZE,
        WIDE=key_cache.numel() > _NARROW,
        num_warps=plan.rows // 16,
        maxnreg=_max_registers(plan.rows, head_dim, query.device),
    )


def compile_prefill(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Compile for both heights what :func:`paged_prefill` would compile at its first call on such tensors. A
    tile without rows computes nothing."""
    tables = torch.zeros(1, 1, dtype=torch.int32, device=query.device)
    for rows in (LOW, TALL):
        plan = PrefillPlan(tables.new_zeros(1, 4), tables, rows, num_tokens=1)
        paged_prefill(query, key_cache, value_cache, torch.empty_like(query), plan, 1.0)
