"""SharedPrefixAttention in Triton: the operation and the plan of the CUDA kernel (paper section 5.3).

One program after the other of a fixed grid takes every n-th (entry, KV head) pair of the plan, so that a CUDA
graph captured on one plan replays on another; a second launch merges partial results in the order of their
parts. ``TRITON_INTERPRET=1`` runs it on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 16


@dataclass(frozen=True)
class PlanTensors:
    """The int32 buffers of a plan and those of its partial results (csrc/kernels/shared_prefix_work.cuh)."""

    num_entries: Tensor  # [1]
    entries: Tensor  # [., 8]: representative, begin, end, first member, members, part, two unused
    members: Tensor  # [., 2]: request, part (-1: its only one)
    part_begin: Tensor  # [>= num_requests + 1]
    block_tables: Tensor  # [num_requests, max_blocks]
    part_output: Tensor  # [max_parts, num_heads, head_dim], float32
    part_max_sum: Tensor  # [max_parts, num_heads, 2], float32


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_attention(  # type: ignore[no-untyped-def]
    q,
    key_cache,
    value_cache,
    table,
    begin,
    end,
    kv_head,
    scale_log2,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of an entry's rows over its tokens, tile by tile: the weighted values, the largest score (of base 2),
    and the sum of the weights."""
    dims = tl.arange(0, HEAD_DIM)
    columns = tl.arange(0, TILE)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in range(begin, end, TILE):
        position = start + columns
        is_token = position < end
        block = tl.load(table + position // BLOCK, mask=is_token, other=0).to(tl.int64)
        slot = (block * BLOCK + position % BLOCK) * KV_HEADS + kv_head
        cached = (slot * HEAD_DIM)[:, None] + dims[None, :]
        k = tl.load(key_cache + cached, mask=is_token[:, None], other=0.0)
        v = tl.load(value_cache + cached, mask=is_token[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        scores = tl.where(is_token[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        factor = tl.exp2(top - new_top)
        total = total * factor + tl.sum(weights, 1)
        result = result * factor[:, None] + tl.dot(weights.to(v.dtype), v)
        top = new_top
    return result, top, total


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,
    key_cache,
    value_cache,
    output,
    num_entries,
    entries,
    members,
    block_tables,
    part_output,
    part_max_sum,
    scale_log2,
    max_blocks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    for work in range(tl.program_id(0), tl.load(num_entries) * KV_HEADS, tl.num_programs(0)):
        kv_head = work % KV_HEADS
        entry = entries + work // KV_HEADS * 8
        begin = tl.load(entry + 1)
        end = tl.load(entry + 2)
        table = block_tables + tl.load(entry).to(tl.int64) * max_blocks
        is_row = rows < tl.load(entry + 4) * GROUP
        member = members + (tl.load(entry + 3) + rows // GROUP) * 2
        request = tl.load(member, mask=is_row, other=0).to(tl.int64)
        part = tl.load(member + 1, mask=is_row, other=0).to(tl.int64)
        head = kv_head * GROUP + rows % GROUP
        at = ((request * HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
        q = tl.load(query + at, mask=is_row[:, None], other=0.0)
        result, top, total = _softmax_attention(
            q,
            key_cache,
            value_cache,
            table,
            begin,
            end,
            kv_head,
            scale_log2,
            KV_HEADS,
            HEAD_DIM,
            ROWS,
            TILE,
            BLOCK,
        )
        is_whole = is_row & (part < 0)
        is_part = is_row & (part >= 0)
        tl.store(output + at, (result / total[:, None]).to(output.dtype.element_ty), mask=is_whole[:, None])
        index = part * HEADS + head
        tl.store(part_output + (index * HEAD_DIM)[:, None] + dims[None, :], result, mask=is_part[:, None])
        tl.store(part_max_sum + index * 2, top, mask=is_part)
        tl.store(part_max_sum + index * 2 + 1, total, mask=is_part)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    output,
    part_begin,
    part_output,
    part_max_sum,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    row = tl.program_id(0)
    head = row % HEADS
    dims = tl.arange(0, HEAD_DIM)
    begin = tl.load(part_begin + row // HEADS)
    end = tl.load(part_begin + row // HEADS + 1)
    if end - begin > 1:
        top = -float("inf")
        total = 0.0
        result = tl.zeros([HEAD_DIM], tl.float32)
        for part in range(begin, end):
            index = part * HEADS + head
            part_top = tl.load(part_max_sum + index * 2)
            new_top = tl.maximum(top, part_top)
            factor = tl.exp2(top - new_top)
            weight = tl.exp2(part_top - new_top)
            total = total * factor + weight * tl.load(part_max_sum + index * 2 + 1)
            result = result * factor + weight * tl.load(part_output + index * HEAD_DIM + dims)
            top = new_top
        tl.store(output + row.to(tl.int64) * HEAD_DIM + dims, (result / total).to(output.dtype.element_ty))


def shared_prefix_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    plan: PlanTensors,
    scale: float,
    *,
    max_rows: int,
    num_workers: int,
) -> None:
    """Launch on the current stream, on tensors that the caller has checked.

    query and output [n, heads, head_dim]; caches [num_blocks, 16, kv_heads, head_dim]; max_rows: query rows
    of the plan's entries at most, a power of two from 16; num_workers: programs that run at once.
    """
    num_requests, heads, head_dim = query.shape
    _attend[(num_workers,)](
        query,
        key_cache,
        value_cache,
        output,
        plan.num_entries,
        plan.entries,
        plan.members,
        plan.block_tables,
        plan.part_output,
        plan.part_max_sum,
        scale * math.log2(math.e),
        plan.block_tables.stride(0),
        HEADS=heads,
        KV_HEADS=key_cache.shape[2],
        HEAD_DIM=head_dim,
        ROWS=max_rows,
        TILE=64,
        BLOCK=BLOCK_SIZE,
        num_warps=4,
        num_stages=3,
    )
    _merge[(num_requests * heads,)](
        output,
        plan.part_begin,
        plan.part_output,
        plan.part_max_sum,
        HEADS=heads,
        HEAD_DIM=head_dim,
        num_warps=1,
    )


def num_triton_workers(device: torch.device) -> int:
    """Programs of :func:`shared_prefix_attention_triton` that run at once on ``device``, about."""
    if device.type != "cuda":
        return 1  # the interpreter
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)
