"""The decoder's operations in plain torch: the oracle of the others, and what runs where they do not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import paged_attention, plan_attention
from .ops import Batch, DecoderShape, Pages


class TorchOps:
    """``DecoderOps[Tensor, Tensor, Tensor]`` on any device and in any dtype that torch computes with."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype

    def pack(self, weight: Tensor, *, gated: bool = False) -> Tensor:  # noqa: ARG002
        """The weight as it is; what makes a gated layer is done by :meth:`TorchStep.gated_linear`."""
        return weight

    def pack_norm(self, weight: Tensor) -> Tensor:
        """The weight as it is."""
        return weight

    def begin(self, batch: Batch, pages: Pages) -> TorchStep:
        """Plan attention and the rotation of this step's positions."""
        return TorchStep(self.shape, self.dtype, batch, pages)


class TorchStep:
    """``DecoderStep[Tensor, Tensor, Tensor]``; activations are in the model's dtype."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, batch: Batch, pages: Pages) -> None:
        self._shape = shape
        self._batch = batch
        self._pages = pages
        group_size = shape.num_heads // shape.num_kv_heads
        self._plan = plan_attention(batch.query_start, batch.seq_lens, batch.block_tables, group_size, dtype)
        angles = batch.positions[:, None, None].float() * shape.inverse_frequencies
        self._cos, self._sin = angles.cos(), angles.sin()  # float32 [T, 1, head_dim / 2]

    def embed(self, table: Tensor) -> Tensor:
        """[T, hidden]."""
        return F.embedding(self._batch.token_ids, table)

    def project_qkv(self, x: Tensor, norm: Tensor, weight: Tensor, layer: int) -> Tensor:
        """[T, heads, head_dim]."""
        shape, slots = self._shape, self._batch.slots
        heads = F.linear(self._norm(x, norm), weight).view(x.shape[0], -1, shape.head_dim)
        num_rotated = shape.num_heads + shape.num_kv_heads
        rotated = self._rotate(heads[:, :num_rotated])
        self._pages.k[layer].flatten(0, 1).index_copy_(0, slots, rotated[:, shape.num_heads :])
        self._pages.v[layer].flatten(0, 1).index_copy_(0, slots, heads[:, num_rotated:])
        return rotated[:, : shape.num_heads].contiguous()

    def attend(self, query: Tensor, layer: int) -> Tensor:
        """[T, heads * head_dim]."""
        return paged_attention(query, self._pages.k[layer], self._pages.v[layer], self._plan).flatten(1)

    def add_linear(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """A new tensor, [T, hidden]."""
        return x + F.linear(y, weight)

    def gated_linear(self, x: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        """[T, intermediate]."""
        gate, up = F.linear(self._norm(x, norm), weight).chunk(2, dim=-1)
        return F.silu(gate) * up

    def logits(self, x: Tensor, norm: Tensor, head: Tensor) -> Tensor:
        """float32 [m, vocab]."""
        wanted = self._norm(x.index_select(0, self._batch.logit_rows), norm)
        return F.linear(wanted, head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._shape.rms_norm_eps)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding of [T, n, head_dim] in fp32: element i turns with element i + head_dim / 2."""
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = self._cos, self._sin
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
