"""The decoder over a paged KV cache: one step for a batch of prefill chunks and decodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal

import torch
from torch import Tensor

from .._core import PackedLinear
from ..config import Backend
from ..kernels.cpu_ops import F32, Array, CpuOps
from ..kernels.ops import DecoderOps, DecoderShape, DecoderStep, Heads, Linear, Rows
from ..kernels.tensor_checks import with_index
from ..kernels.torch_ops import TorchOps
from .backends import choose_backend
from .batch import PagedKV, StepBatch
from .model_config import ModelConfig
from .weights import ModelWeights, load_weights

if TYPE_CHECKING:
    from ..kernels.gpu_ops import GpuOps

__all__ = ["DecoderModel", "ModelConfig"]


@dataclass(frozen=True, slots=True)
class Decoder(Generic[Linear, Rows, Heads]):
    """The layers of the model, over the operations of a backend."""

    ops: DecoderOps[Linear, Rows, Heads]
    weights: ModelWeights[Linear, Rows]

    def forward(self, batch: StepBatch, kv: PagedKV) -> Tensor:
        """Write K and V of the step's tokens into ``kv``; [m, vocab], logits of ``logit_rows``
        in float32 or the model's dtype, valid until the next step."""
        return self.run(self.ops.begin(batch, kv))

    def run(self, step: DecoderStep[Linear, Rows, Heads]) -> Tensor:
        """The same for a step that was begun."""
        weights = self.weights
        x = step.embed(weights.embedding, weights.positions)
        for index, layer in enumerate(weights.layers):
            query = step.project_qkv(x, layer.attention_norm, layer.qkv, layer.head_norms, index)
            x = step.add_linear(x, step.attend(query, index), layer.output)
            x = step.add_linear(x, step.expand(x, layer.mlp_norm, layer.up), layer.down)
        return step.logits(x, weights.final_norm, weights.head)


AnyDecoder = Decoder[Tensor, Tensor, Tensor] | Decoder[PackedLinear, F32, Array]


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """A decoder with its weights. ``forward`` keeps nothing but what it writes into the KV cache."""

    config: ModelConfig
    decoder: AnyDecoder
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def load(
        cls,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device | str,
        backend: Backend = "auto",
        *,
        share_prefixes: bool = True,
        dummy_weights: bool = False,
    ) -> DecoderModel:
        """Load a Hugging Face directory (config.json, safetensors).

        ``backend``: whose operations compute it; see :func:`choose_backend`. ``share_prefixes`` off: decodes
        with a common prefix read it once each (natively; in torch they always do). ``dummy_weights``: random
        ones, so that config.json is all that is read. Raises :class:`ModelFileError` naming the file, field
        or tensor that is missing or wrong, :class:`ConfigError` for a backend that cannot run here.
        """
        device = with_index(device)
        config = ModelConfig.load(directory)
        backend = choose_backend(backend, dtype, device, config.head_dim)
        with torch.inference_mode():
            if backend == "native" and device.type == "cpu":
                cpu = CpuOps(_shape(config, device), dtype, share_prefixes=share_prefixes)
                packed = load_weights(directory, config, dtype, device, cpu, dummy=dummy_weights)
                return cls(config, Decoder(cpu, packed), dtype, device)
            ops: DecoderOps[Tensor, Tensor, Tensor]
            if backend == "torch":
                ops = TorchOps(_shape(config, device), dtype)
            else:
                ops = _gpu_ops(config, device, "cuda" if backend == "native" else "triton", share_prefixes)
            weights = load_weights(directory, config, dtype, device, ops, dummy=dummy_weights)
        return cls(config, Decoder(ops, weights), dtype, device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: PagedKV) -> Tensor:
        """Compute one step: write K and V of its tokens into ``kv``, return logits of ``batch.logit_rows``:
        [m, vocab], in float32 or the model's dtype, valid until the next step."""
        return self.decoder.forward(batch, kv)


def _gpu_ops(
    config: ModelConfig, device: torch.device, implementation: Literal["cuda", "triton"], share_prefixes: bool
) -> GpuOps:
    from ..kernels.gpu_ops import GpuOps  # Triton, which is not everywhere

    return GpuOps(
        _shape(config, device),
        device,
        max_positions=config.max_positions,
        attention=implementation,
        share_prefixes=share_prefixes,
    )


def _shape(config: ModelConfig, device: torch.device) -> DecoderShape:
    return DecoderShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        inverse_frequencies=config.inverse_frequencies().to(device),
        norm=config.norm,
        mlp=config.mlp,
    )
