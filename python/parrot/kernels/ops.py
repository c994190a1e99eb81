"""What a backend does for the decoder: the few operations of a layer, each as fused as the backend can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from .draws import Draws

NormKind = Literal["rms", "layer"]
Mlp = Literal["gated_silu", "relu"]

# A backend's own forms of the weight of a linear layer, of activations (one row for each token of the step;
# the weights of norms and biases too), and of queries and what attention gives.
Linear = TypeVar("Linear")
Rows = TypeVar("Rows")
Heads = TypeVar("Heads")


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the operations need to know of a model besides its weights."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    inverse_frequencies: Tensor  # float32 [head_dim / 2], radians per position
    norm: NormKind = "rms"
    mlp: Mlp = "gated_silu"


@dataclass(frozen=True, slots=True)
class Affine(Generic[Linear, Rows]):
    """A linear layer."""

    weight: Linear  # [out, in]
    bias: Rows | None  # [out]


@dataclass(frozen=True, slots=True)
class Norm(Generic[Rows]):
    """RMSNorm, or with a bias LayerNorm (``DecoderShape.norm`` says which)."""

    weight: Rows  # [hidden]
    bias: Rows | None  # [hidden]


@dataclass(frozen=True, slots=True)
class HeadNorms(Generic[Rows]):
    """RMSNorm of each head of the queries and of the keys."""

    query: Rows  # [head_dim]
    key: Rows  # [head_dim]


class Batch(Protocol):
    """One step, as ``engine.batch.StepBatch`` describes it."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_start: list[int]
    seq_lens: list[int]
    block_tables: Tensor
    logit_rows: Tensor
    previous_ids: Tensor | None
    draws: Draws | None


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step has at most."""

    rows: int  # tokens
    sequences: int
    blocks: int  # of one sequence

    @classmethod
    def of(cls, batch: Batch) -> StepLimits:
        """What this step needs."""
        return cls(len(batch.token_ids), *batch.block_tables.shape)

    def hold(self, other: StepLimits) -> bool:
        """Whether buffers of these limits do for ``other``."""
        return other.rows <= self.rows and other.sequences <= self.sequences and other.blocks <= self.blocks

    def grown(self, other: StepLimits) -> StepLimits:
        """Limits that hold both; what is short becomes the next power of two."""

        def larger(mine: int, theirs: int) -> int:
            return mine if theirs <= mine else 1 << (theirs - 1).bit_length()

        return StepLimits(
            larger(self.rows, other.rows),
            larger(self.sequences, other.sequences),
            larger(self.blocks, other.blocks),
        )


class Pages(Protocol):
    """Keys and values of every layer, [num_blocks, 16, kv_heads, head_dim] each; the order within a block is
    the backend's own."""

    k: list[Tensor]
    v: list[Tensor]


def known_ids(token_ids: Tensor, previous_ids: Tensor | None) -> Tensor:
    """``token_ids`` [T] with row r of ``previous_ids`` in place of -1 - r; both on one device. A row that has
    no id, which is -1, becomes id 0: whose it is will not use it."""
    if previous_ids is None or not len(previous_ids):
        return token_ids
    found = previous_ids.index_select(0, (-1 - token_ids).clamp(min=0)).clamp(min=0)
    return torch.where(token_ids < 0, found.to(token_ids.dtype), token_ids)


class DecoderStep(Protocol[Linear, Rows, Heads]):
    """The operations of one step. What one returns is valid until the same one is called again."""

    def embed(self, table: Linear, positions: Linear | None) -> Rows:
        """Rows of ``table`` [vocab, hidden] for the step's tokens; plus those of ``positions``
        [max_positions, hidden], if given, for where they stand."""

    def project_qkv(
        self,
        x: Rows,
        norm: Norm[Rows],
        qkv: Affine[Linear, Rows],
        head_norms: HeadNorms[Rows] | None,
        layer: int,
    ) -> Heads:
        """Norm, projection, norms of heads, rotary embedding; keys and values go into the pages of ``layer``.
        Returns the queries."""

    def attend(self, query: Heads, layer: int) -> Heads:
        """Attention of each row over its sequence up to and including itself."""

    def add_linear(self, x: Rows, y: Rows | Heads, linear: Affine[Linear, Rows]) -> Rows:
        """``x`` + linear(``y``); may be written over ``x``."""

    def expand(self, x: Rows, norm: Norm[Rows], up: Affine[Linear, Rows]) -> Rows:
        """Norm, then the first half of the MLP: silu(gate) * up for ``up`` = [gate; up], or relu(up)."""

    def logits(self, x: Rows, norm: Norm[Rows], head: Linear) -> Tensor:
        """Norm and head for the rows of which logits are wanted: [m, vocab], float32 or the model's dtype."""


class DecoderOps(Protocol[Linear, Rows, Heads]):
    """A backend for one model. ``num_shared_decodes`` counts rows so far whose attention read a prefix once
    for several sequences."""

    num_shared_decodes: int

    def pack(self, weight: Tensor, *, gated: bool = False) -> Linear:
        """A weight [out, in] in the form that the operations read; ``gated``: [gate; up] of an
        ``expand`` without bias."""

    def pack_row(self, row: Tensor) -> Rows:
        """The weight of a norm, or a bias: [n]."""

    def begin(self, batch: Batch, pages: Pages) -> DecoderStep[Linear, Rows, Heads]:
        """Plan what all layers of a step have in common."""
