"""The decoder's operations on a GPU: cuBLAS products through torch, those of few rows and everything between
products in own kernels.

Decodes go through SharedPrefixAttention, chunks of prefill through paged prefill; CUDA, or a Triton twin.
LayerNorm, which one family has, is torch's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .gpu_buffers import StepBuffers, StepViews
from .ops import Affine, Batch, DecoderShape, HeadNorms, Norm, Pages, StepLimits
from .paged_prefill import PrefillPlan, compile_prefill, paged_prefill
from .paged_prefill_cuda import CudaPrefill
from .shared_prefix import Implementation, SharedPrefixAttention
from .torch_ops import TensorStep
from .triton_draw import draw
from .triton_ids import put_known_ids
from .triton_linear import MAX_ROWS, FewRowProducts
from .triton_ops import rms_norm, rope_append, silu_mul

_FIRST_LIMITS = StepLimits(rows=512, sequences=64, blocks=512)  # of buffers that were not reserved; they grow


class GpuOps:
    """``DecoderOps[Tensor, Tensor, Tensor]`` for float16 and bfloat16. ``attention``: of decodes, and of
    chunks where the CUDA kernel for them runs; elsewhere Triton computes them."""

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
        self._buffers: StepBuffers | None = None
        is_cuda = attention == "cuda" and CudaPrefill.supports(device, shape.head_dim)
        self._cuda_prefill = CudaPrefill(device) if is_cuda else None
        self._few_rows = FewRowProducts(device)

    def pack(self, weight: Tensor, *, gated: bool = False) -> Tensor:  # noqa: ARG002
        """The weight as it is; what makes a gated layer is done by :meth:`GpuStep.expand`."""
        return weight

    def pack_row(self, row: Tensor) -> Tensor:
        """The row as it is."""
        return row

    def reserve(self, limits: StepLimits, num_blocks: int) -> None:
        """Make the buffers of steps within ``limits`` on pages of so many blocks; they stay where they are
        for every such step."""
        self._buffers = self._make_buffers(limits, num_blocks)

    def compile_prefill(self, pages: Pages) -> None:
        """Compile the kernels for chunks of prefill now, so that no long prompt waits for it."""
        keys, values = pages.k[0], pages.v[0]
        compile_prefill(keys.new_empty(1, self.shape.num_heads, self.shape.head_dim), keys, values)

    def prefill(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, plan: PrefillPlan, scale: float
    ) -> None:
        """Attention of the plan's chunks: by the CUDA kernel where it runs and the step has tiles of its
        height, the tall ones; else by Triton's."""
        kernel = self._cuda_prefill
        if kernel is None or plan.rows != kernel.rows:
            paged_prefill(query, keys, values, out, plan, scale)
        else:
            kernel(query, keys, values, out, plan, scale)

    def few_rows(self, num_rows: int) -> FewRowProducts | None:
        """What multiplies so few rows with weights; None: cuBLAS is to."""
        return self._few_rows if num_rows <= MAX_ROWS else None

    def begin(self, batch: Batch, pages: Pages) -> GpuStep:
        """Plan the attention of decodes and of chunks, and upload all that the step reads."""
        buffers = self._buffers_for(StepLimits.of(batch))
        views = buffers.pack(batch, share=self.share_prefixes)
        _fill_in(views, batch.previous_ids)
        if views.num_decodes:
            self.num_shared_decodes += buffers.attention.num_sharing
        return GpuStep(self, buffers, views, pages)

    def begin_decodes(self, batch: Batch, pages: Pages, num_rows: int) -> GpuStep:
        """The same for sequences with one row each, padded to ``num_rows``: what the step launches, and on
        which addresses, depends on that number alone while the buffers were reserved. Nobody owns the last of
        the pages: padding writes there. Logits of all rows."""
        limits = StepLimits.of(batch)
        buffers = self._buffers_for(StepLimits(num_rows, num_rows, limits.blocks))
        views = buffers.pack_decodes(batch, num_rows, len(pages.k[0]) - 1, share=self.share_prefixes)
        _fill_in(views, batch.previous_ids)
        self.num_shared_decodes += buffers.attention.num_sharing
        return GpuStep(self, buffers, views, pages)

    def _buffers_for(self, limits: StepLimits) -> StepBuffers:
        if self._buffers is None:
            self._buffers = self._make_buffers(_FIRST_LIMITS.grown(limits))
        elif not self._buffers.limits.hold(limits):
            self._buffers = self._make_buffers(self._buffers.limits.grown(limits))
        return self._buffers

    def _make_buffers(self, limits: StepLimits, num_blocks: int | None = None) -> StepBuffers:
        staging = StepBuffers.stage(limits, self._device)
        attention = SharedPrefixAttention(
            max_requests=limits.sequences,
            max_blocks=limits.blocks,
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            device=self._device,
            num_blocks=num_blocks,
            implementation=self._implementation,
            staging=staging,
        )
        return StepBuffers(limits, staging, attention)


def _fill_in(views: StepViews, previous_ids: Tensor | None) -> None:
    """Not a part of what is recorded: recording computes more than once, and these ids change with it."""
    if previous_ids is not None and len(previous_ids):
        put_known_ids(views.token_ids, previous_ids)


class GpuStep(TensorStep):
    """``DecoderStep[Tensor, Tensor, Tensor]``."""

    def __init__(self, ops: GpuOps, buffers: StepBuffers, views: StepViews, pages: Pages) -> None:
        super().__init__(ops.shape, views, pages)
        self._views = views
        self._attention = buffers.attention
        self._ops = ops
        self._rotations = ops.rotations
        self._scale = ops.shape.head_dim**-0.5
        self._few_rows = ops.few_rows(len(views.token_ids))

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
        projected = self._project(x, norm, qkv)
        return rope_append(
            projected.view(len(x), -1, shape.head_dim),
            self._views.positions,
            self._views.slots,
            self._rotations,
            None if head_norms is None else (head_norms.query, head_norms.key),
            shape.norm_eps,
            self._pages.k[layer],
            self._pages.v[layer],
        )

    def attend(self, query: Tensor, layer: int) -> Tensor:
        """[T, heads * head_dim]."""
        keys, values = self._pages.k[layer], self._pages.v[layer]
        out = torch.empty_like(query)
        if self._views.num_decodes:
            self._attend_decodes(query, keys, values, out)
        if self._views.chunks is not None:
            self._ops.prefill(query, keys, values, out, self._views.chunks, self._scale)
        return out.flatten(1)

    def _attend_decodes(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        count, rows = self._views.num_decodes, self._views.decode_rows
        if rows is None:
            self._attention(query[:count], keys, values, out[:count], self._scale)
            return
        part = torch.empty_like(query[:count])
        self._attention(query.index_select(0, rows), keys, values, part, self._scale)
        out.index_copy_(0, rows.long(), part)

    def add_linear(self, x: Tensor, y: Tensor, linear: Affine[Tensor, Tensor]) -> Tensor:
        """``x`` itself: the product is added to it as it is written."""
        if self._few_rows is not None:
            return self._few_rows(y, linear.weight, linear.bias, added_to=x)
        torch.addmm(x, y, linear.weight.t(), out=x)
        return x if linear.bias is None else x.add_(linear.bias)

    def expand(self, x: Tensor, norm: Norm[Tensor], up: Affine[Tensor, Tensor]) -> Tensor:
        """[T, intermediate]."""
        if self._shape.mlp == "relu":
            return F.relu(self._project(x, norm, up))
        if self._few_rows is not None:
            return self._project(x, norm, up, gated=True)
        return silu_mul(self._project(x, norm, up))

    def _project(
        self, x: Tensor, norm: Norm[Tensor], linear: Affine[Tensor, Tensor], *, gated: bool = False
    ) -> Tensor:
        """The product with the normalised rows. ``gated``, for few rows only: silu(gate) * up of it."""
        if self._few_rows is None:
            return F.linear(self._norm(x, norm), linear.weight, linear.bias)
        if self._shape.norm == "rms":
            rms = norm.weight, self._shape.norm_eps
            return self._few_rows(x, linear.weight, linear.bias, norm=rms, gated=gated)
        return self._few_rows(self._norm(x, norm), linear.weight, linear.bias, gated=gated)

    def logits(self, x: Tensor, norm: Norm[Tensor], head: Tensor) -> Tensor:
        """[m, vocab], in the model's dtype: most ids are chosen from them as they are."""
        return F.linear(self._norm(self._wanted(x), norm), head)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of a step of decodes, int64 [T] each: ids by the step's draws, and the likeliest
        (:func:`~.triton_draw.draw`)."""
        return draw(logits, self._views.draws)

    def _norm(self, x: Tensor, norm: Norm[Tensor]) -> Tensor:
        if self._shape.norm == "rms":
            return rms_norm(x, norm.weight, self._shape.norm_eps)
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, self._shape.norm_eps)
