"""The decoder over a paged KV cache: one step for a batch of prefill chunks and decodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor

from .._core import PackedLinear, cpu_isa
from ..config import Backend
from ..errors import ConfigError
from ..kernels.cpu_attention import CpuAttention
from ..kernels.cpu_ops import F32, Array, CpuOps
from ..kernels.ops import DecoderOps, DecoderShape, Heads, Linear, Rows
from ..kernels.torch_ops import TorchOps
from .batch import PagedKV, StepBatch
from .model_config import ModelConfig
from .weights import ModelWeights, load_weights

__all__ = ["DecoderModel", "ModelConfig"]


@dataclass(frozen=True, slots=True)
class Decoder(Generic[Linear, Rows, Heads]):
    """The layers of the model, over the operations of a backend."""

    ops: DecoderOps[Linear, Rows, Heads]
    weights: ModelWeights[Linear, Rows]

    def forward(self, batch: StepBatch, kv: PagedKV) -> Tensor:
        """Write K and V of the step's tokens into ``kv``; float32 [m, vocab], logits of ``logit_rows``."""
        step, weights = self.ops.begin(batch, kv), self.weights
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
        device = torch.device(device)
        config = ModelConfig.load(directory)
        backend = choose_backend(backend, dtype, device, config.head_dim)
        decoder: AnyDecoder
        with torch.inference_mode():
            shape = _shape(config, device)
            if backend == "native":
                cpu = CpuOps(shape, dtype, share_prefixes=share_prefixes)
                decoder = Decoder(
                    cpu, load_weights(directory, config, dtype, device, cpu, dummy=dummy_weights)
                )
            else:
                plain = TorchOps(shape, dtype)
                decoder = Decoder(
                    plain, load_weights(directory, config, dtype, device, plain, dummy=dummy_weights)
                )
        return cls(config, decoder, dtype, device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: PagedKV) -> Tensor:
        """Compute one step: write K and V of its tokens into ``kv``, return logits of ``batch.logit_rows``,
        float32 [m, vocab]."""
        return self.decoder.forward(batch, kv)


def choose_backend(backend: Backend, dtype: torch.dtype, device: torch.device, head_dim: int) -> Backend:
    """``native`` (the kernels of ``csrc/kernels/cpu``) or ``torch``.

    ``auto`` is native on a CPU in float32 or bfloat16, unless the kernels know none of its vector
    instructions or not this head size. Raises :class:`ConfigError`, also for a wrong ``PARROT_CPU_ISA``.
    """
    try:
        isa = cpu_isa()
    except ValueError as error:
        raise ConfigError(f"{error}; correct or unset it", param="PARROT_CPU_ISA") from None
    possible = CpuAttention.supports(head_dim, dtype, device)
    if backend == "native" and not possible:
        raise ConfigError(
            f"backend = 'native' cannot compute {dtype} with heads of {head_dim} on {device}; it does "
            "float32 and bfloat16 with heads of a multiple of 16 on the CPU",
            param="backend",
        )
    if backend != "auto":
        return backend
    return "native" if possible and isa != "scalar" else "torch"


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
