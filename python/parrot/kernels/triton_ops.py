"""What stands around attention on a GPU, in Triton: RMSNorm, rotation with the append of K and V, SiLU-mul.

Each fuses what would else be several passes over the activations; sums are float32. ``TRITON_INTERPRET=1``
runs them on the CPU.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK_SIZE = 16


@cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on this device may start before the one ahead of them ends (programmatic dependent
    launch). One that does waits on the device before it reads what others wrote, and before it writes."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]
    x, weight, out, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, PADDED)
    is_column = column < SIZE
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row + column, mask=is_column, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / SIZE + eps)
    gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row + column, (values * scale * gain).to(out.dtype.element_ty), mask=is_column)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the rows of ``x`` [T, hidden], contiguous; a new tensor."""
    out = torch.empty_like(x)
    size = x.shape[1]
    early = starts_early(x.device)
    if len(x):
        _rms_norm[(len(x),)](
            x,
            weight,
            out,
            eps,
            SIZE=size,
            PADDED=triton.next_power_of_2(size),
            EARLY=early,
            num_warps=8,
            launch_pdl=early,
        )
    return out


@triton.jit
def _gains(query_norm, key_norm, element, is_element, is_query):  # type: ignore[no-untyped-def]
    """What each head's elements are multiplied by, by its kind: [heads, elements]."""
    for_query = tl.load(query_norm + element, mask=is_element, other=0.0).to(tl.float32)
    for_key = tl.load(key_norm + element, mask=is_element, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], for_query[None, :], for_key[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _store_halves(target, low, high, mask, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of heads, of which ``target`` are the first's elements."""
    tl.store(target, low, mask=mask)
    tl.store(target + HALF, high, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _rope_append(  # type: ignore[no-untyped-def]
    qkv,
    positions,
    slots,
    cosines,
    sines,
    query_norm,
    key_norm,
    query,
    key_cache,
    value_cache,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:  # but attention, which starts early too, is not to run beside what is ahead of this kernel
        gdc_wait()
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    element = tl.arange(0, PADDED)
    is_element = element < HALF
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    is_loaded = (head < HEADS + 2 * KV_HEADS)[:, None] & is_element[None, :]
    at = (head * HEAD_DIM)[:, None] + element[None, :]
    source = qkv + row * (HEADS + 2 * KV_HEADS) * HEAD_DIM + at
    first = tl.load(source, mask=is_loaded, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_loaded, other=0.0).to(tl.float32)
    turns = (is_query | is_key)[:, None]
    if HAS_NORMS:
        total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = (1.0 / tl.sqrt(total / HEAD_DIM + eps))[:, None]
        gain = _gains(query_norm, key_norm, element, is_element, is_query)
        first = tl.where(turns, first * scale * gain, first)
        gain = _gains(query_norm + HALF, key_norm + HALF, element, is_element, is_query)
        second = tl.where(turns, second * scale * gain, second)
    angle = tl.load(positions + row) * HALF + element
    cosine = tl.where(turns, tl.load(cosines + angle, mask=is_element, other=0.0)[None, :], 1.0)
    sine = tl.where(turns, tl.load(sines + angle, mask=is_element, other=0.0)[None, :], 0.0)
    low = (first * cosine - second * sine).to(query.dtype.element_ty)
    high = (second * cosine + first * sine).to(query.dtype.element_ty)
    _store_halves(query + row * HEADS * HEAD_DIM + at, low, high, is_query[:, None] & is_loaded, HALF)
    cached = tl.load(slots + row).to(tl.int64) * KV_HEADS * HEAD_DIM + at
    key = key_cache + cached - HEADS * HEAD_DIM
    _store_halves(key, low, high, is_key[:, None] & is_loaded, HALF)
    value = value_cache + cached - (HEADS + KV_HEADS) * HEAD_DIM
    _store_halves(value, low, high, is_value[:, None] & is_loaded, HALF)


def rope_append(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rotations: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    key_cache: Tensor,
    value_cache: Tensor,
) -> Tensor:
    """Normalise (``norms`` [head_dim] each: of query and of key heads) and rotate the heads of ``qkv``
    [T, heads + 2 * kv_heads, head_dim], append keys and values to the caches [num_blocks, 16, kv_heads,
    head_dim] at ``slots`` [T], and return the queries [T, heads, head_dim].

    ``positions`` and ``slots``: of any integer type. ``rotations``: cosines and sines, float32
    [max_positions, head_dim / 2]. All contiguous, the others in one dtype.
    """
    num_rows, num_heads, head_dim = qkv.shape
    kv_heads = key_cache.shape[2]
    query = qkv.new_empty(num_rows, num_heads - 2 * kv_heads, head_dim)
    tile, early = 16, starts_early(qkv.device)
    _rope_append[(num_rows, triton.cdiv(num_heads, tile))](
        qkv,
        positions,
        slots,
        *rotations,
        *((qkv, qkv) if norms is None else norms),
        query,
        key_cache,
        value_cache,
        eps,
        HEADS=num_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim // 2),
        TILE=tile,
        HAS_NORMS=norms is not None,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return query


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < SIZE
    source = gate_up + row * 2 * SIZE + column
    gate = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=is_column, other=0.0).to(tl.float32)
    tl.store(
        out + row * SIZE + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=is_column
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for rows [gate; up] of ``gate_up`` [T, 2 * n], contiguous; a new tensor [T, n]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    _silu_mul[(num_rows, triton.cdiv(size, 1024))](gate_up, out, SIZE=size, TILE=1024, num_warps=4)
    return out
