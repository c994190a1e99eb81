"""The decoder's operations on the CPU by the native kernels: weights packed once, a few calls per layer.

Activations are float32 whatever the model's dtype, except queries and what attention gives, which have that
of the KV cache. They live in buffers that grow to the largest step and stay, so that a step touches no fresh
memory. bf16 travels as uint16, which numpy has.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import _core
from .._core import TensorView
from .cpu_attention import CpuAttention
from .ops import Affine, Batch, DecoderShape, HeadNorms, Norm, Pages, known_ids

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
Array = F32 | U16

Element = TypeVar("Element", np.float32, np.uint16)


_KEPT_LOGIT_ROWS = 64  # prompts whose log-probabilities are wanted have more, and seldom
_FIRST_POSITIONS = 2048  # of the table of rotations; it doubles when a sequence is longer


class CpuOps:
    """``DecoderOps[PackedLinear, F32, Array]`` for float32 and bfloat16."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, *, share_prefixes: bool = True) -> None:
        """Raises ValueError for a shape or dtype that :meth:`CpuAttention.supports` denies."""
        self.shape = shape
        self.dtype = dtype
        self.buffers = _Buffers()
        self.attention = CpuAttention(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype)
        self.share_prefixes = share_prefixes
        self.num_shared_decodes = 0
        self.rotations = _Rotations(shape.inverse_frequencies)
        self._pages: Pages | None = None
        self._caches: list[_Cache] = []

    def pack(self, weight: Tensor, *, gated: bool = False) -> _core.PackedLinear:
        """A copy in the order in which it is read; ``weight`` itself is not kept."""
        return _core.PackedLinear(as_numpy(weight), gated=gated)

    def pack_row(self, row: Tensor) -> F32:
        """float32 [n]; a copy, since ``row`` may hold a whole file in memory."""
        return row.float().numpy().copy()

    def begin(self, batch: Batch, pages: Pages) -> CpuStep:
        """Plan attention and the rotation of this step's positions."""
        if pages is not self._pages:
            self._caches = [
                _Cache(as_numpy(k), as_numpy(v), self.attention.view("k", k), self.attention.view("v", v))
                for k, v in zip(pages.k, pages.v, strict=True)
            ]
            self._pages = pages  # which the views point into
        return CpuStep(self, batch, len(pages.k[0]), self._caches)


@dataclass(frozen=True, slots=True)
class _Cache:
    """The pages of one layer, as the projection and as attention take them."""

    k: Array
    v: Array
    k_view: TensorView
    v_view: TensorView


class CpuStep:
    """``DecoderStep[PackedLinear, F32, Array]``."""

    def __init__(self, ops: CpuOps, batch: Batch, num_blocks: int, caches: list[_Cache]) -> None:
        shape = ops.shape
        self._shape = shape
        self._batch = batch
        self._caches = caches
        self._buffers = ops.buffers
        self._num_rows = len(batch.token_ids)
        self._slots = batch.slots.numpy()
        self._cos, self._sin = ops.rotations.at(batch.positions.numpy(), max(batch.seq_lens))
        ops.attention.plan(
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            num_blocks,
            share=ops.share_prefixes,
        )
        ops.num_shared_decodes += ops.attention.num_sharing
        self._attention = ops.attention
        self._scale = shape.head_dim**-0.5
        self._query, self._attended = self._heads("query", ops.dtype), self._heads("attended", ops.dtype)
        self._query_view = ops.attention.view("query", _as_tensor(self._query))
        self._attended_view = ops.attention.view("out", _as_tensor(self._attended))

    def embed(self, table: _core.PackedLinear, positions: _core.PackedLinear | None) -> F32:
        """[T, hidden]: the residual stream."""
        x = self._floats("x", table.in_features)
        table.gather(known_ids(self._batch.token_ids, self._batch.previous_ids).numpy(), x)
        if positions is not None:
            at = self._floats("position", table.in_features)
            positions.gather(self._batch.positions.numpy(), at)
            x += at
        return x

    def project_qkv(
        self,
        x: F32,
        norm: Norm[F32],
        qkv: Affine[_core.PackedLinear, F32],
        head_norms: HeadNorms[F32] | None,
        layer: int,
    ) -> Array:
        """[T, heads, head_dim] in the dtype of the cache."""
        shape, out = self._shape, self._floats("qkv", qkv.weight.num_outputs)
        self._normed_linear(x, norm, qkv, out)
        if head_norms is not None:
            heads = out.reshape(len(out), -1, shape.head_dim)
            num_rotated = shape.num_heads + shape.num_kv_heads
            _norm_heads(heads[:, : shape.num_heads], head_norms.query, shape.norm_eps)
            _norm_heads(heads[:, shape.num_heads : num_rotated], head_norms.key, shape.norm_eps)
        cache = self._caches[layer]
        _core.rope_append(out, self._cos, self._sin, self._slots, self._query, cache.k, cache.v)
        return self._query

    def attend(self, query: Array, layer: int) -> Array:  # noqa: ARG002
        """[T, heads * head_dim] in the dtype of the cache."""
        cache = self._caches[layer]
        self._attention.run(
            self._query_view, cache.k_view, cache.v_view, self._attended_view, scale=self._scale
        )
        return self._attended.reshape(self._num_rows, -1)

    def add_linear(self, x: F32, y: Array, linear: Affine[_core.PackedLinear, F32]) -> F32:
        """``x`` itself."""
        linear.weight.forward(y, x, add=True)
        if linear.bias is not None:
            x += linear.bias
        return x

    def expand(self, x: F32, norm: Norm[F32], up: Affine[_core.PackedLinear, F32]) -> F32:
        """[T, intermediate]."""
        out = self._floats("expanded", up.weight.num_outputs)
        self._normed_linear(x, norm, up, out)
        if self._shape.mlp == "relu":
            return np.maximum(out, 0.0, out=out)
        if up.bias is None:
            return out  # gated by the layer itself
        gate, linear = np.split(out, 2, axis=1)
        with np.errstate(over="ignore"):
            activated: F32 = gate / (1 + np.exp(-gate))
        return activated * linear

    def logits(self, x: F32, norm: Norm[F32], head: _core.PackedLinear) -> Tensor:
        """float32 [m, vocab]. Memory that a decode step keeps: fresh pages would have to be zeroed first."""
        wanted = x[self._batch.logit_rows.numpy()]
        shape = (len(wanted), head.num_outputs)
        is_kept = len(wanted) <= _KEPT_LOGIT_ROWS
        out = self._buffers.get("logits", shape, np.float32) if is_kept else np.empty(shape, np.float32)
        self._normed_linear(wanted, norm, Affine(head, None), out)
        return torch.from_numpy(out)

    def _normed_linear(
        self, x: F32, norm: Norm[F32], linear: Affine[_core.PackedLinear, F32], out: F32
    ) -> None:
        """RMSNorm is part of the native layer; LayerNorm and biases, which few families have, are numpy."""
        eps = self._shape.norm_eps
        if self._shape.norm == "rms":
            linear.weight.forward(x, out, norm.weight, eps)
        else:
            centred = x - x.mean(1, keepdims=True)
            deviation = np.sqrt(np.square(centred).mean(1, keepdims=True) + np.float32(eps))
            linear.weight.forward(centred / deviation * norm.weight + norm.bias, out)
        if linear.bias is not None:
            out += linear.bias

    def _heads(self, name: str, dtype: torch.dtype) -> Array:
        shape = (self._num_rows, self._shape.num_heads, self._shape.head_dim)
        if dtype == torch.float32:
            return self._buffers.get(name, shape, np.float32)
        return self._buffers.get(name, shape, np.uint16)

    def _floats(self, name: str, width: int) -> F32:
        return self._buffers.get(name, (self._num_rows, width), np.float32)


def _norm_heads(heads: F32, weight: F32, eps: float) -> None:
    """RMSNorm of the last axis, in place."""
    scale = np.sqrt(np.square(heads).mean(-1, keepdims=True) + np.float32(eps))
    heads[...] = heads / scale * weight


class _Rotations:
    """Cosine and sine of every position that has come up, in a table that grows."""

    def __init__(self, inverse_frequencies: Tensor) -> None:
        self._inverse_frequencies = inverse_frequencies
        self._grow(_FIRST_POSITIONS)

    def at(self, positions: npt.NDArray[np.int64], end: int) -> tuple[F32, F32]:
        """float32 [T, head_dim / 2] each, for positions [T] below ``end``."""
        if end > len(self._cos):
            self._grow(max(end, 2 * len(self._cos)))
        return self._cos[positions], self._sin[positions]

    def _grow(self, num_positions: int) -> None:
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * self._inverse_frequencies
        self._cos: F32 = angles.cos().numpy()
        self._sin: F32 = angles.sin().numpy()


class _Buffers:
    """Memory by name, the largest that was ever asked for."""

    def __init__(self) -> None:
        self._flat: dict[str, npt.NDArray[Any]] = {}

    def get(self, name: str, shape: tuple[int, ...], element: type[Element]) -> npt.NDArray[Element]:
        """A view with this shape; what is in it is not defined."""
        size = prod(shape)
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = np.empty(size, element)
        return flat[:size].reshape(shape)


def as_numpy(tensor: Tensor) -> Array:
    """The same memory; bf16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        bits: npt.NDArray[np.uint16] = tensor.view(torch.uint16).numpy()
        return bits
    floats: F32 = tensor.numpy()
    return floats


def _as_tensor(array: Array) -> Tensor:
    """The same memory; bits of bf16 as bf16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
