"""Paged attention in plain torch: the reference, and the CPU backend's default.

A step mixes sequences that decode (one token) with sequences that prefill a chunk. Decodes are computed
together: their keys and values are gathered into padded tensors, sequences of similar length in one group.
A prefill chunk is computed by itself, over all that its sequence has so far, with the causal mask shifted by
what lies before the chunk. Which slots to read is the same in every layer, so it is planned once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 16
_PADDING_RATIO = 1.25  # a group of decodes holds lengths up to this ratio ...
_PADDING_TOKENS = 64  # ... plus this many tokens


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one token in this step."""

    rows: Tensor  # int64 [n], row of each in the step
    slots: Tensor  # int64 [n * length], slots to read; past the end of a sequence its first slot again
    mask: Tensor  # [n, 1, 1, length], 0 where the sequence has a token, else -inf


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence with several tokens in this step."""

    start: int  # rows [start, end) of the step
    end: int
    slots: Tensor  # int64 [length], slots to read: all of the sequence's
    mask: Tensor  # [group * (end - start), length], 0 where a row may look, else -inf


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What to read for the queries of one step; the same for every layer."""

    decodes: tuple[_Decodes, ...]
    chunks: tuple[_Chunk, ...]


def plan_attention(
    query_start: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Tensor,
    group_size: int,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Plan one step of n sequences, which have at least one row each.

    ``query_start`` [n + 1]: first row of each sequence in the step, then the number of rows. ``seq_lens``
    [n]: length of each, its rows included. ``block_tables`` int64 [n, max_blocks]; entries past the end of a
    sequence are not used. ``group_size``: query heads per KV head. ``dtype``: that of the queries.
    """
    decodes: list[int] = []
    chunks: list[_Chunk] = []
    for i, length in enumerate(seq_lens):
        start, end = query_start[i], query_start[i + 1]
        if end - start == 1:
            decodes.append(i)
        else:
            slots = _slots(block_tables[i : i + 1], [length])[0]
            chunks.append(_Chunk(start, end, slots[0], _causal_mask(slots, end - start, group_size, dtype)))
    decodes.sort(key=lambda i: seq_lens[i])
    groups = [
        _plan_decodes(g, query_start, seq_lens, block_tables, dtype) for g in _groups(decodes, seq_lens)
    ]
    return AttentionPlan(tuple(groups), tuple(chunks))


def paged_attention(query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention of each row over its sequence up to and including itself; softmax in fp32.

    ``query`` [T, heads, head_dim]; ``k_cache``, ``v_cache`` [num_blocks, 16, kv_heads, head_dim], in which
    this step's keys and values are already written. Returns [T, heads, head_dim]. Slots that no sequence of
    the plan owns may hold anything, NaN too.
    """
    out = torch.empty_like(query)
    for group in plan.decodes:
        out.index_copy_(0, group.rows, _decode(query.index_select(0, group.rows), k_cache, v_cache, group))
    for chunk in plan.chunks:
        out[chunk.start : chunk.end] = _prefill(query[chunk.start : chunk.end], k_cache, v_cache, chunk)
    return out


def _decode(query: Tensor, k_cache: Tensor, v_cache: Tensor, group: _Decodes) -> Tensor:
    """[n, heads, head_dim]. The heads that share a KV head stand in the place of query positions."""
    n, heads, head_dim = query.shape
    k, v = _gather(k_cache, group.slots, n), _gather(v_cache, group.slots, n)
    q = query.view(n, k.shape[1], -1, head_dim)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask).reshape(n, heads, head_dim)


def _prefill(query: Tensor, k_cache: Tensor, v_cache: Tensor, chunk: _Chunk) -> Tensor:
    """[rows, heads, head_dim]. The heads that share a KV head are stacked along the query positions."""
    rows, heads, head_dim = query.shape
    k, v = _gather(k_cache, chunk.slots, 1), _gather(v_cache, chunk.slots, 1)
    kv_heads = k.shape[1]
    q = query.view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=chunk.mask)
    return out.view(kv_heads, -1, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


def _gather(cache: Tensor, slots: Tensor, n: int) -> Tensor:
    """Rows of a cache for n sequences of one length; [n, kv_heads, length, head_dim], strided."""
    kv_heads, head_dim = cache.shape[2:]
    rows = cache.view(-1, kv_heads * head_dim).index_select(0, slots)
    return rows.view(n, -1, kv_heads, head_dim).transpose(1, 2)


def _groups(decodes: list[int], seq_lens: Sequence[int]) -> Iterator[list[int]]:
    """Cut sequences, ascending by length, into groups in which padding wastes little."""
    group: list[int] = []
    for i in decodes:
        if group and seq_lens[i] > _PADDING_RATIO * seq_lens[group[0]] + _PADDING_TOKENS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _plan_decodes(
    group: list[int],
    query_start: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Tensor,
    dtype: torch.dtype,
) -> _Decodes:
    device = block_tables.device
    rows = torch.tensor([query_start[i] for i in group], device=device)
    members = torch.tensor(group, device=device)
    slots, valid = _slots(block_tables.index_select(0, members), [seq_lens[i] for i in group])
    return _Decodes(rows, slots.flatten(), _additive(valid, dtype)[:, None, None, :])


def _slots(block_tables: Tensor, seq_lens: list[int]) -> tuple[Tensor, Tensor]:
    """Slots of each sequence up to the longest, and which of them are its own; int64 and bool [n, length].

    Past its end a sequence repeats its first slot: finite numbers for the mask to cancel.
    """
    device = block_tables.device
    positions = torch.arange(max(seq_lens), device=device)
    valid = positions < torch.tensor(seq_lens, device=device)[:, None]
    blocks = block_tables.index_select(1, positions // BLOCK_SIZE)
    slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    return torch.where(valid, slots, slots[:, :1]), valid


def _causal_mask(slots: Tensor, rows: int, group_size: int, dtype: torch.dtype) -> Tensor:
    length = slots.shape[1]
    positions = torch.arange(length, device=slots.device)
    return _additive(positions <= positions[length - rows :, None], dtype).repeat(group_size, 1)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, -inf elsewhere; cheaper than a boolean mask, which every layer would convert again."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)
