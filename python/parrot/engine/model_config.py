"""Shape of a decoder, read from a model's config.json.

The families differ in few respects, each of which is one field of :class:`ModelConfig`; the decoder itself
(:mod:`parrot.engine.model`) is one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelFileError
from ..kernels.ops import Mlp, NormKind

JsonObject = Mapping[str, Any]
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "max_positions"),
)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the model was first trained on."""

    kind: str  # "default", "linear" or "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if not 0.0 < self.factor < math.inf:
            raise ValueError(f"the factor of rope scaling, {self.factor}, is not positive and finite")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor} is not positive and below "
                f"high_freq_factor = {self.high_freq_factor}"
            )
        if self.original_max_positions < 1:
            raise ValueError(f"original_max_position_embeddings = {self.original_max_positions} is below 1")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a decoder computes: sizes, and where its family differs from plain LLaMA."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    rope_theta: float | None = 10000.0  # None: positions are embedded, not rotated
    rope_scaling: RopeScaling = RopeScaling("default")
    norm: NormKind = "rms"
    mlp: Mlp = "gated_silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False  # queries and keys are normalised, head by head, before they are rotated

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Read config.json; raises :class:`ModelFileError` for what this decoder does not support."""
        path = directory / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return _parse(raw, path)
        except FileNotFoundError:
            raise ModelFileError(f"{path} is missing; download the model again") from None
        except KeyError as error:
            raise ModelFileError(f"{path} lacks the field {error}; download it again") from None
        except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ModelFileError(f"{path} is malformed ({error}); download it again") from None

    def __post_init__(self) -> None:
        for name in _SIZES:
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} = {getattr(self, name)} is outside [1, 2**31)")
        if not 0.0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps = {self.norm_eps} is negative or not finite")
        if self.rope_theta is not None and not 0.0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta = {self.rope_theta} is not positive and finite")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd, so it cannot be rotated in pairs")

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    def inverse_frequencies(self) -> Tensor:
        """Rotary frequencies, radians per position; float32 [head_dim / 2]. Zeros, which rotate nothing, for
        a model that embeds its positions."""
        if self.rope_theta is None:
            return torch.zeros(self.head_dim // 2)
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequencies = 1.0 / self.rope_theta**exponents
        scaling = self.rope_scaling
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        if scaling.kind == "llama3":
            return _llama3_frequencies(frequencies, scaling)
        return frequencies


def _parse(raw: JsonObject, path: Path) -> ModelConfig:
    """Refuse rather than compute something else than the model means."""
    architectures = raw.get("architectures") or ["LlamaForCausalLM"]
    name = str(architectures[0])
    if len(architectures) != 1 or name not in _FAMILIES:
        raise ModelFileError(f"{path} describes {architectures}; this engine runs {', '.join(_FAMILIES)}")
    _require(raw, path, quantization_config=None)
    return _FAMILIES[name](raw, path)


def _require(raw: JsonObject, path: Path, **supported: object) -> None:
    """These fields, where they are given, must have these values."""
    for field, value in supported.items():
        if raw.get(field, value) != value:
            raise ModelFileError(f"{path}: {field} = {raw[field]!r} is not supported; only {value!r} is")


def _rotary(raw: JsonObject, path: Path, architecture: str, **differences: Any) -> ModelConfig:
    """What the families with rotary positions, RMSNorm and a gated MLP have in common."""
    _require(raw, path, hidden_act="silu")
    num_heads = int(raw["num_attention_heads"])
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "intermediate_size": int(raw["intermediate_size"]),
        "num_layers": int(raw["num_hidden_layers"]),
        "num_heads": num_heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or num_heads),
        "head_dim": int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads),
        "max_positions": int(raw["max_position_embeddings"]),
        "norm_eps": float(raw["rms_norm_eps"]),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "rope_theta": float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        "rope_scaling": _rope_scaling(rope, path),
    }
    return ModelConfig(**{**fields, **differences})


def _llama(raw: JsonObject, path: Path) -> ModelConfig:
    attention_bias = bool(raw.get("attention_bias", False))
    return _rotary(
        raw,
        path,
        "LlamaForCausalLM",
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def _mistral(raw: JsonObject, path: Path) -> ModelConfig:
    return _rotary(raw, path, "MistralForCausalLM", max_positions=_windowed(raw, raw.get("sliding_window")))


def _qwen2(raw: JsonObject, path: Path) -> ModelConfig:
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    return _rotary(raw, path, "Qwen2ForCausalLM", qkv_bias=True, max_positions=_windowed(raw, window))


def _qwen3(raw: JsonObject, path: Path) -> ModelConfig:
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    attention_bias = bool(raw.get("attention_bias", False))
    return _rotary(
        raw,
        path,
        "Qwen3ForCausalLM",
        head_norms=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        max_positions=_windowed(raw, window),
    )


def _windowed(raw: JsonObject, window: int | None) -> int:
    """Tokens of a context. Up to its window a model with sliding attention computes what one without does;
    longer contexts of such a model are refused."""
    longest = int(raw["max_position_embeddings"])
    return longest if window is None else min(longest, int(window))


def _opt(raw: JsonObject, path: Path) -> ModelConfig:
    _require(
        raw,
        path,
        activation_function="relu",
        do_layer_norm_before=True,
        word_embed_proj_dim=raw["hidden_size"],
        layer_norm_elementwise_affine=True,
        _remove_final_layer_norm=False,
    )
    num_heads, has_bias = int(raw["num_attention_heads"]), bool(raw.get("enable_bias", True))
    return ModelConfig(
        architecture="OPTForCausalLM",
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["ffn_dim"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=int(raw["hidden_size"]) // num_heads,
        max_positions=int(raw["max_position_embeddings"]),
        norm_eps=1e-5,
        tie_embeddings=bool(raw.get("tie_word_embeddings", True)),
        rope_theta=None,
        norm="layer",
        mlp="relu",
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
    )


_FAMILIES: Mapping[str, Callable[[JsonObject, Path], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "OPTForCausalLM": _opt,
}


def _rope_scaling(rope: JsonObject, path: Path) -> RopeScaling:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return RopeScaling("default")
    if kind == "linear":
        return RopeScaling("linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    raise ModelFileError(
        f"{path}: rope scaling of type {kind!r} is not supported; only linear and llama3 are"
    )


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between blended."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor
