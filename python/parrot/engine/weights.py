"""A model directory on disk: its configuration and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a LLaMA decoder, from config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Read config.json; raises :class:`ModelFileError` for what this decoder does not support."""

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize
