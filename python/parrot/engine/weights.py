"""A model directory on disk: its configuration and its tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelFileError
from ..kernels.ops import DecoderOps, Heads, Linear, Rows
from ..models import weight_files

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the model was first trained on."""

    kind: str  # "default", "linear" or "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


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
    rope_scaling: RopeScaling = RopeScaling("default")

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Read config.json; raises :class:`ModelFileError` for what this decoder does not support."""
        path = directory / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            _check_supported(raw, path)
            return cls._from_json(raw, path)
        except FileNotFoundError:
            raise ModelFileError(f"{path} is missing; download the model again") from None
        except KeyError as error:
            raise ModelFileError(f"{path} lacks the field {error}; download it again") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelFileError(f"{path} is malformed ({error}); download it again") from None

    @classmethod
    def _from_json(cls, raw: JsonObject, path: Path) -> ModelConfig:
        num_heads = int(raw["num_attention_heads"])
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        return cls(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads),
            max_positions=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            rope_scaling=_rope_scaling(rope, path),
        )

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd, so it cannot be rotated in pairs")

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    def inverse_frequencies(self) -> Tensor:
        """Rotary frequencies, radians per position; float32 [head_dim / 2]."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequencies = 1.0 / self.rope_theta**exponents
        scaling = self.rope_scaling
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        if scaling.kind == "llama3":
            return _llama3_frequencies(frequencies, scaling)
        return frequencies


def _check_supported(raw: JsonObject, path: Path) -> None:
    """Refuse rather than compute something else than the model means."""
    architectures = raw.get("architectures") or ["LlamaForCausalLM"]
    if architectures != ["LlamaForCausalLM"]:
        raise ModelFileError(f"{path} describes {architectures}; this engine runs LlamaForCausalLM")
    for field, supported in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if raw.get(field, supported) != supported:
            raise ModelFileError(f"{path}: {field} = {raw[field]!r} is not supported; only {supported!r} is")


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


@dataclass(slots=True)
class LayerWeights(Generic[Linear, Rows]):
    """One decoder layer; q, k, v and gate, up are fused so that each input is read once. Shapes are those on
    disk; the form is the backend's."""

    attention_norm: Rows  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    output: Linear  # [hidden, heads * head_dim]
    mlp_norm: Rows  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear  # [hidden, intermediate]


@dataclass(slots=True)
class ModelWeights(Generic[Linear, Rows]):
    """All weights of a model, in one dtype on one device."""

    embedding: Linear  # [vocab, hidden]
    layers: list[LayerWeights[Linear, Rows]]
    final_norm: Rows  # [hidden]
    head: Linear  # [vocab, hidden]; the embedding itself if they are tied


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ops: DecoderOps[Linear, Rows, Heads],
) -> ModelWeights[Linear, Rows]:
    """Read the safetensors of a directory; each tensor is packed as ``ops`` wants it and then let go.

    Raises :class:`ModelFileError` naming the file, or the tensor that is missing or has another shape than
    config.json asks for, with both shapes.
    """
    with ExitStack() as stack:
        source = _TensorSource(directory, dtype, device, stack)
        embedding = ops.pack(source.read("model.embed_tokens", config.vocab_size, config.hidden_size))
        layers = [_load_layer(source, config, f"model.layers.{i}", ops) for i in range(config.num_layers)]
        final_norm = ops.pack_norm(source.read("model.norm", config.hidden_size))
        head = embedding
        if not config.tie_embeddings:
            head = ops.pack(source.read("lm_head", config.vocab_size, config.hidden_size))
    return ModelWeights(embedding, layers, final_norm, head)


def _load_layer(
    source: _TensorSource, config: ModelConfig, name: str, ops: DecoderOps[Linear, Rows, Heads]
) -> LayerWeights[Linear, Rows]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    q = source.read(f"{attention}.q_proj", q_rows, hidden)
    k = source.read(f"{attention}.k_proj", kv_rows, hidden)
    v = source.read(f"{attention}.v_proj", kv_rows, hidden)
    gate = source.read(f"{mlp}.gate_proj", intermediate, hidden)
    up = source.read(f"{mlp}.up_proj", intermediate, hidden)
    return LayerWeights(
        attention_norm=ops.pack_norm(source.read(f"{name}.input_layernorm", hidden)),
        qkv=ops.pack(torch.cat([q, k, v])),
        output=ops.pack(source.read(f"{attention}.o_proj", hidden, q_rows)),
        mlp_norm=ops.pack_norm(source.read(f"{name}.post_attention_layernorm", hidden)),
        gate_up=ops.pack(torch.cat([gate, up]), gated=True),
        down=ops.pack(source.read(f"{mlp}.down_proj", hidden, intermediate)),
    )


class _TensorSource:
    """The tensors of all safetensors files of a model, by name; open until ``stack`` closes."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device, stack: ExitStack) -> None:
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in weight_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelFileError(f"{path} cannot be read ({error}); download it again") from None
            self._files.update(dict.fromkeys(file.keys(), (path, file)))

    def read(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name``.weight, which must have this shape."""
        name = f"{name}.weight"
        if name not in self._files:
            raise ModelFileError(f"{self._directory} has no tensor {name!r}; download the model again")
        path, file = self._files[name]
        tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelFileError(
                f"{path}: tensor {name!r} has the shape {tuple(tensor.shape)}; config.json asks for {shape}"
            )
        return tensor.to(device=self._device, dtype=self._dtype)
