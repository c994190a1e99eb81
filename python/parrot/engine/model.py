"""The LLaMA decoder over a paged KV cache, in torch: one step for a batch of prefill chunks and decodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention import AttentionPlan, paged_attention, plan_attention
from .batch import PagedKV, StepBatch
from .weights import LayerWeights, ModelConfig, ModelWeights, load_weights

__all__ = ["LlamaModel", "ModelConfig"]


@dataclass(frozen=True, slots=True)
class _Rotation:
    """Cosine and sine of this step's positions, float32 [T, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class LlamaModel:
    """A decoder with its weights. ``forward`` keeps nothing but what it writes into the KV cache."""

    config: ModelConfig
    weights: ModelWeights
    inverse_frequencies: Tensor  # float32 [head_dim / 2]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, device: torch.device | str) -> LlamaModel:
        """Load a Hugging Face directory (config.json, safetensors).

        Raises :class:`ModelFileError` naming the file, field or tensor that is missing or wrong.
        """
        device = torch.device(device)
        config = ModelConfig.load(directory)
        with torch.inference_mode():
            weights = load_weights(directory, config, dtype, device)
            frequencies = config.inverse_frequencies().to(device)
        return cls(config, weights, frequencies, dtype, device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: PagedKV) -> Tensor:
        """Compute one step: write K and V of its tokens into ``kv``, return logits of ``batch.logit_rows``,
        float32 [m, vocab]."""
        group_size = self.config.num_heads // self.config.num_kv_heads
        plan = plan_attention(batch.query_start, batch.seq_lens, batch.block_tables, group_size, self.dtype)
        rotation = self._rotation(batch.positions)
        x = F.embedding(batch.token_ids, self.weights.embedding)
        for layer, k_cache, v_cache in zip(self.weights.layers, kv.k, kv.v, strict=True):
            h = self._norm(x, layer.attention_norm)
            h = self._attention(h, layer, k_cache, v_cache, batch.slots, plan, rotation)
            x = x + h
            x = x + self._mlp(self._norm(x, layer.mlp_norm), layer)
        wanted = self._norm(x.index_select(0, batch.logit_rows), self.weights.final_norm)
        return F.linear(wanted, self.weights.head).float()

    def _attention(
        self,
        x: Tensor,
        layer: LayerWeights,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        rotation: _Rotation,
    ) -> Tensor:
        config = self.config
        heads = F.linear(x, layer.qkv).view(x.shape[0], -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated = _rotate(heads[:, :num_rotated], rotation)
        query, key = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        k_cache.flatten(0, 1).index_copy_(0, slots, key)
        v_cache.flatten(0, 1).index_copy_(0, slots, heads[:, num_rotated:])
        out = paged_attention(query.contiguous(), k_cache, v_cache, plan)
        return F.linear(out.flatten(1), layer.output)

    @staticmethod
    def _mlp(x: Tensor, layer: LayerWeights) -> Tensor:
        gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _rotation(self, positions: Tensor) -> _Rotation:
        angles = positions[:, None, None].float() * self.inverse_frequencies
        return _Rotation(angles.cos(), angles.sin())


def _rotate(x: Tensor, rotation: _Rotation) -> Tensor:
    """Rotary embedding of [T, n, head_dim] in fp32: element i turns with element i + head_dim / 2."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotation.cos, rotation.sin
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
