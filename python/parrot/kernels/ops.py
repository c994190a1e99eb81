"""What a backend does for the decoder: the few operations of a layer, each as fused as the backend can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

# A backend's own forms of the weight of a linear layer, of activations (one row for each token of the step;
# norm weights too), and of queries and what attention gives.
Linear = TypeVar("Linear")
Rows = TypeVar("Rows")
Heads = TypeVar("Heads")
_Linear = TypeVar("_Linear", contravariant=True)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the operations need to know of a model besides its weights."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    inverse_frequencies: Tensor  # float32 [head_dim / 2], radians per position


class Batch(Protocol):
    """One step, as ``engine.batch.StepBatch`` describes it."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_start: list[int]
    seq_lens: list[int]
    block_tables: Tensor
    logit_rows: Tensor


class Pages(Protocol):
    """Keys and values of every layer, [num_blocks, 16, kv_heads, head_dim] each."""

    k: list[Tensor]
    v: list[Tensor]


class DecoderStep(Protocol[_Linear, Rows, Heads]):
    """The operations of one step. What one returns is valid until the same one is called again."""

    def embed(self, table: _Linear) -> Rows:
        """Rows of ``table`` [vocab, hidden] for the step's tokens."""

    def project_qkv(self, x: Rows, norm: Rows, weight: _Linear, layer: int) -> Heads:
        """RMSNorm, projection, rotary embedding; keys and values go into the pages of ``layer``. Returns the
        queries."""

    def attend(self, query: Heads, layer: int) -> Heads:
        """Attention of each row over its sequence up to and including itself."""

    def add_linear(self, x: Rows, y: Rows | Heads, weight: _Linear) -> Rows:
        """``x`` + linear(``y``); may be written over ``x``."""

    def gated_linear(self, x: Rows, norm: Rows, weight: _Linear) -> Rows:
        """RMSNorm, then silu(gate) * up, for ``weight`` = [gate; up]."""

    def logits(self, x: Rows, norm: Rows, head: _Linear) -> Tensor:
        """RMSNorm and head for the rows of which logits are wanted; float32 [m, vocab]."""


class DecoderOps(Protocol[Linear, Rows, Heads]):
    """A backend for one model."""

    def pack(self, weight: Tensor, *, gated: bool = False) -> Linear:
        """A weight [out, in] in the form that the operations read; ``gated``: the one of ``gated_linear``."""

    def pack_norm(self, weight: Tensor) -> Rows:
        """The weight of an RMSNorm, [hidden]."""

    def begin(self, batch: Batch, pages: Pages) -> DecoderStep[Linear, Rows, Heads]:
        """Plan what all layers of a step have in common."""
