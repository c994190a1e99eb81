"""The decoder's operations on a GPU: cuBLAS products through torch, everything between them in own kernels.

Decodes go through SharedPrefixAttention (CUDA, or its Triton twin), chunks of prefill through paged prefill.
LayerNorm, which one family has, is torch's.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .ops import Affine, Batch, DecoderShape, HeadNorms, Norm, Pages
from .paged_prefill import PrefillPlan, paged_prefill, plan_prefill
from .shared_prefix import Implementation, SharedPrefixAttention
from .torch_ops import TensorStep
from .triton_ops import rms_norm, rope_append, silu_mul

_FIRST_REQUESTS = 64  # of the buffers of a plan, which grow
_FIRST_BLOCKS = 512


class GpuOps:
    """``DecoderOps[Tensor, Tensor, Tensor]`` for float16 and bfloat16. ``attention``: of decodes."""

    def __init__(
        self,
        shape: DecoderShape,
        device: torch.device,
        *,
        max_positions: int,
        attention: Implementation,
        share_prefixes: bool = True,
    ) -> None:
        self.shape = shape
        self.share_prefixes = share_prefixes
        self.num_shared_decodes = 0
        angles = torch.arange(max_positions, device=device)[:, None].float() * shape.inverse_frequencies
        self.rotations = angles.cos(), angles.sin()
        self._device = device
        self._implementation = attention
        self._attention = self._make_attention(_FIRST_REQUESTS, _FIRST_BLOCKS)

    def pack(self, weight: Tensor, *, gated: bool = False) -> Tensor:  # noqa: ARG002
        """The weight as it is; what makes a gated layer is done by :meth:`GpuStep.expand`."""
        return weight

    def pack_row(self, row: Tensor) -> Tensor:
        """The row as it is."""
        return row

    def begin(self, batch: Batch, pages: Pages) -> GpuStep:
        """Plan the attention of decodes and of chunks."""
        return GpuStep(self, batch, pages)

    def attention_for(self, num_requests: int, num_blocks: int) -> SharedPrefixAttention:
        """The kernel with buffers for so many decodes of so many blocks each."""
        attention = self._attention
        if num_requests > attention.max_requests or num_blocks > attention.max_blocks:
            requests = max(attention.max_requests, 1 << (num_requests - 1).bit_length())
            blocks = max(attention.max_blocks, 1 << (num_blocks - 1).bit_length())
            attention = self._attention = self._make_attention(requests, blocks)
        return attention

    def _make_attention(self, max_requests: int, max_blocks: int) -> SharedPrefixAttention:
        return SharedPrefixAttention(
            max_requests=max_requests,
            max_blocks=max_blocks,
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            device=self._device,
            implementation=self._implementation,
        )


class GpuStep(TensorStep):
    """``DecoderStep[Tensor, Tensor, Tensor]``."""

    def __init__(self, ops: GpuOps, batch: Batch, pages: Pages) -> None:
        super().__init__(ops.shape, batch, pages)
        self._rotations = ops.rotations
        self._scale = ops.shape.head_dim**-0.5
        rows = np.diff(batch.query_start)
        decodes = np.flatnonzero(rows == 1)
        self._decodes = _Decodes.plan(ops, batch, decodes) if len(decodes) else None
        chunks = np.flatnonzero(rows > 1).tolist()
        self._chunks: PrefillPlan | None = None
        if chunks:
            self._chunks = plan_prefill(batch.query_start, batch.seq_lens, chunks, batch.block_tables)

    def project_qkv(
        self,
        x: Tensor,
        norm: Norm[Tensor],
        qkv: Affine[Tensor, Tensor],
        head_norms: HeadNorms[Tensor] | None,
        layer: int,
    ) -> Tensor:
        """[T, heads, head_dim]."""
        shape = self._shape
        projected = F.linear(self._norm(x, norm), qkv.weight, qkv.bias)
        return rope_append(
            projected.view(len(x), -1, shape.head_dim),
            self._batch.positions,
            self._batch.slots,
            self._rotations,
            None if head_norms is None else torch.stack([head_norms.query, head_norms.key]),
            shape.norm_eps,
            self._pages.k[layer],
            self._pages.v[layer],
        )

    def attend(self, query: Tensor, layer: int) -> Tensor:
        """[T, heads * head_dim]."""
        keys, values = self._pages.k[layer], self._pages.v[layer]
        out = torch.empty_like(query)
        if self._decodes is not None:
            self._decodes.attend(query, keys, values, out, self._scale)
        if self._chunks is not None:
            paged_prefill(query, keys, values, out, self._chunks, self._scale)
        return out.flatten(1)

    def add_linear(self, x: Tensor, y: Tensor, linear: Affine[Tensor, Tensor]) -> Tensor:
        """``x`` itself: the product is added to it as it is written."""
        torch.addmm(x, y, linear.weight.t(), out=x)
        return x if linear.bias is None else x.add_(linear.bias)

    def expand(self, x: Tensor, norm: Norm[Tensor], up: Affine[Tensor, Tensor]) -> Tensor:
        """[T, intermediate]."""
        y = F.linear(self._norm(x, norm), up.weight, up.bias)
        return F.relu(y) if self._shape.mlp == "relu" else silu_mul(y)

    def _norm(self, x: Tensor, norm: Norm[Tensor]) -> Tensor:
        if self._shape.norm == "rms":
            return rms_norm(x, norm.weight, self._shape.norm_eps)
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, self._shape.norm_eps)


class _Decodes:
    """Sequences with one row in the step."""

    def __init__(self, attention: SharedPrefixAttention, rows: Tensor | None) -> None:
        self._attention = attention
        self._rows = rows  # None: the first of the step

    @classmethod
    def plan(cls, ops: GpuOps, batch: Batch, decodes: np.ndarray) -> _Decodes:
        tables = batch.block_tables.cpu().numpy()[decodes].astype(np.int32)
        attention = ops.attention_for(*tables.shape)
        seq_lens = np.asarray(batch.seq_lens, dtype=np.int32)[decodes]
        attention.plan(tables, seq_lens, share=ops.share_prefixes)
        ops.num_shared_decodes += attention.num_sharing
        rows = np.asarray(batch.query_start)[decodes]
        if np.array_equal(rows, np.arange(len(rows))):
            return cls(attention, None)
        return cls(attention, torch.from_numpy(rows).to(batch.token_ids.device))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, scale: float) -> None:
        """Fill the rows of ``out`` that belong to decodes."""
        count = self._attention.num_requests
        if self._rows is None:
            self._attention(query[:count], keys, values, out[:count], scale)
            return
        part = torch.empty_like(query[:count])
        self._attention(query.index_select(0, self._rows), keys, values, part, scale)
        out.index_copy_(0, self._rows, part)
