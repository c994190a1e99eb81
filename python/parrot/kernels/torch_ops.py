"""The decoder's operations in plain torch: the oracle of the others, and what runs where they do not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import paged_attention, plan_attention
from .ops import Affine, Batch, DecoderShape, HeadNorms, Norm, Pages, known_ids


class TorchOps:
    """``DecoderOps[Tensor, Tensor, Tensor]`` on any device and in any dtype that torch computes with."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.num_shared_decodes = 0  # each sequence reads its own tokens

    def pack(self, weight: Tensor, *, gated: bool = False) -> Tensor:  # noqa: ARG002
        """The weight as it is; what makes a gated layer is done by :meth:`TorchStep.expand`."""
        return weight

    def pack_row(self, row: Tensor) -> Tensor:
        """The row as it is."""
        return row

    def begin(self, batch: Batch, pages: Pages) -> TorchStep:
        """Take the step to the device of the pages; plan attention and the rotation of its positions."""
        return TorchStep(self.shape, self.dtype, batch, pages)


class StepRows(Protocol):
    """The rows of a step, integers on the model's device."""

    @property
    def token_ids(self) -> Tensor:
        """[T]."""

    @property
    def positions(self) -> Tensor:
        """[T], of each token within its sequence."""

    @property
    def logit_rows(self) -> Tensor | None:
        """[m], those of which logits are wanted; None: all."""


class TensorStep(ABC):
    """What steps over torch tensors have in common; activations are in the model's dtype."""

    def __init__(self, shape: DecoderShape, rows: StepRows, pages: Pages) -> None:
        self._shape = shape
        self._rows = rows
        self._pages = pages

    def embed(self, table: Tensor, positions: Tensor | None) -> Tensor:
        """[T, hidden]."""
        x = F.embedding(self._rows.token_ids, table)
        return x if positions is None else x + F.embedding(self._rows.positions, positions)

    def logits(self, x: Tensor, norm: Norm[Tensor], head: Tensor) -> Tensor:
        """float32 [m, vocab]."""
        return F.linear(self._norm(self._wanted(x), norm), head).float()

    def _wanted(self, x: Tensor) -> Tensor:
        """The rows of which logits are wanted."""
        return x if self._rows.logit_rows is None else x.index_select(0, self._rows.logit_rows)

    @abstractmethod
    def _norm(self, x: Tensor, norm: Norm[Tensor]) -> Tensor:
        """RMSNorm or LayerNorm of the rows of ``x``."""


@dataclass(frozen=True, slots=True)
class _Rows:
    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor


class TorchStep(TensorStep):
    """``DecoderStep[Tensor, Tensor, Tensor]``."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, batch: Batch, pages: Pages) -> None:
        device = pages.k[0].device
        rows = _Rows(
            known_ids(batch.token_ids.to(device), batch.previous_ids),
            batch.positions.to(device),
            batch.logit_rows.to(device),
        )
        super().__init__(shape, rows, pages)
        self._slots = batch.slots.to(device)
        group_size = shape.num_heads // shape.num_kv_heads
        tables = batch.block_tables.to(device)
        self._plan = plan_attention(batch.query_start, batch.seq_lens, tables, group_size, dtype)
        angles = rows.positions[:, None, None].float() * shape.inverse_frequencies
        self._cos, self._sin = angles.cos(), angles.sin()  # float32 [T, 1, head_dim / 2]

    def project_qkv(
        self,
        x: Tensor,
        norm: Norm[Tensor],
        qkv: Affine[Tensor, Tensor],
        head_norms: HeadNorms[Tensor] | None,
        layer: int,
    ) -> Tensor:
        """[T, heads, head_dim]."""
        shape, slots = self._shape, self._slots
        heads = F.linear(self._norm(x, norm), qkv.weight, qkv.bias).view(x.shape[0], -1, shape.head_dim)
        num_rotated = shape.num_heads + shape.num_kv_heads
        query, key = heads[:, : shape.num_heads], heads[:, shape.num_heads : num_rotated]
        if head_norms is not None:
            query = F.rms_norm(query, query.shape[-1:], head_norms.query, shape.norm_eps)
            key = F.rms_norm(key, key.shape[-1:], head_norms.key, shape.norm_eps)
        self._pages.k[layer].flatten(0, 1).index_copy_(0, slots, self._rotate(key))
        self._pages.v[layer].flatten(0, 1).index_copy_(0, slots, heads[:, num_rotated:])
        return self._rotate(query)

    def attend(self, query: Tensor, layer: int) -> Tensor:
        """[T, heads * head_dim]."""
        return paged_attention(query, self._pages.k[layer], self._pages.v[layer], self._plan).flatten(1)

    def add_linear(self, x: Tensor, y: Tensor, linear: Affine[Tensor, Tensor]) -> Tensor:
        """A new tensor, [T, hidden]."""
        return x + F.linear(y, linear.weight, linear.bias)

    def expand(self, x: Tensor, norm: Norm[Tensor], up: Affine[Tensor, Tensor]) -> Tensor:
        """[T, intermediate]."""
        y = F.linear(self._norm(x, norm), up.weight, up.bias)
        if self._shape.mlp == "relu":
            return F.relu(y)
        gate, linear = y.chunk(2, dim=-1)
        return F.silu(gate) * linear

    def _norm(self, x: Tensor, norm: Norm[Tensor]) -> Tensor:
        shape, eps = norm.weight.shape, self._shape.norm_eps
        if self._shape.norm == "rms":
            return F.rms_norm(x, shape, norm.weight, eps)
        return F.layer_norm(x, shape, norm.weight, norm.bias, eps)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding of [T, n, head_dim] in fp32: element i turns with element i + head_dim / 2."""
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = self._cos, self._sin
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
