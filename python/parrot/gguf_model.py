"""Converts a GGUF file (LLaMA, Mistral, Qwen2, Qwen3) into a Hugging Face directory (safetensors, fp32)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from .errors import ModelFileError, ParrotError
from .tokenizer.from_gguf import tokenizer_files

Progress = Callable[[str, float], None]  # (what is being done, fraction done in [0, 1])
Array = npt.NDArray[np.float32]

# general.architecture -> the class that transformers runs it with. Mistral is written as llama.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXTRA = {  # tensors of a layer that some architectures have besides
    "qwen2": {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
    "qwen3": {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"},
}
# What LLaMA 3.1 and later divide each frequency of the rotation by, float32 [head_dim / 2]. config.json says
# it by a factor and these, which are the same in all of them.
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+\.(?:weight|bias))\Z")


def convert_gguf(path: Path, directory: Path, progress: Progress) -> None:
    """Write config.json, model.safetensors, the tokenizer and generation_config.json into ``directory``.

    Raises :class:`ModelFileError` naming the file and the fix if it is damaged or of another architecture.
    """
    try:
        _convert(path, directory, progress)
    except (ParrotError, OSError, MemoryError):
        raise
    except Exception as error:  # what reads numbers, and the binding of tokenizers, raise whatever they do
        raise ModelFileError(f"{path} is damaged ({error}); download or install it again") from error


def _convert(path: Path, directory: Path, progress: Progress) -> None:
    reader = _open(path)
    source = _Source(path, reader)
    if source.architecture not in _ARCHITECTURES:
        raise ModelFileError(
            f"{path} holds a model of architecture {source.architecture!r}; supported are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    tied = "output.weight" not in {tensor.name for tensor in reader.tensors}
    config = _config(source, tied)
    tensors = dict(_tensors(source, config, progress))
    _check_complete(source, tensors, config)
    progress("writing tensors", 0.9)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in tokenizer_files(source.metadata, str(path)).items():
        (directory / name).write_text(content, encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    progress("done", 1.0)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist; check the path") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError, UnicodeDecodeError) as error:
        raise ModelFileError(
            f"{path} is truncated or not a GGUF file ({error}); download or install it again"
        ) from error


class _Source:
    """Metadata and tensors of an open GGUF file."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path = path
        self.reader = reader
        self.architecture = str(self.metadata("general.architecture"))

    def metadata(self, key: str) -> object:
        """One metadata field, None if the file does not have it."""
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def number(self, key: str, default: float | None = None) -> float:
        """A numeric field of the file's architecture."""
        key = f"{self.architecture}.{key}"
        value = self.metadata(key)
        if isinstance(value, (int, float)):
            return value
        if default is None:
            raise ModelFileError(f"{self.path} lacks the field {key}; download or install it again")
        return default


def _config(source: _Source, tied: bool) -> dict[str, object]:
    hidden, heads = int(source.number("embedding_length")), int(source.number("attention.head_count"))
    head_dim = int(source.number("attention.key_length", hidden // heads))
    tokens = cast("list[str]", source.metadata("tokenizer.ggml.tokens") or [])
    if int(source.number("rope.dimension_count", head_dim)) != head_dim:
        raise ModelFileError(f"{source.path} rotates a part of each head, which is not supported")
    config: dict[str, object] = {
        "architectures": [_ARCHITECTURES[source.architecture]],
        "model_type": source.architecture,
        "vocab_size": int(source.number("vocab_size", len(tokens))),
        "hidden_size": hidden,
        "intermediate_size": int(source.number("feed_forward_length")),
        "num_hidden_layers": int(source.number("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(source.number("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(source.number("context_length")),
        "rms_norm_eps": source.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": source.number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }
    config.update(_rope_scaling(source, head_dim))
    for name in ("bos", "eos"):
        token_id = source.metadata(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int):
            config[f"{name}_token_id"] = token_id
    return config


def _rope_scaling(source: _Source, head_dim: int) -> dict[str, object]:
    kind = source.metadata(f"{source.architecture}.rope.scaling.type")
    factors = [tensor.data for tensor in source.reader.tensors if tensor.name == _ROPE_FACTORS]
    linear = source.number("rope.scaling.factor", source.number("rope.scale_linear", 0.0))  # new and old name
    if kind is None and linear not in (0.0, 1.0):
        kind = "linear"  # as llama.cpp reads it
    if kind in (None, "none") and factors:
        return {"rope_scaling": _llama3_scaling(source, np.asarray(factors[0], np.float32), head_dim)}
    if kind in (None, "none"):
        return {}
    if kind == "linear" and not factors:
        return {
            "rope_scaling": {"rope_type": "linear", "factor": linear or source.number("rope.scaling.factor")}
        }
    raise ModelFileError(
        f"{source.path} scales its positions by {kind!r}, which is not supported from GGUF; "
        "use the model's Hugging Face directory"
    )


def _llama3_scaling(source: _Source, factors: Array, head_dim: int) -> dict[str, object]:
    """The scaling that has these ``factors``; the largest of them is the one of config.json."""
    factor = round(float(factors.max(initial=1.0)), 3)  # float32 of a short number
    frequencies = source.number("rope.freq_base", 10000.0) ** -(np.arange(0, head_dim, 2) / head_dim)
    low, high, positions = _LLAMA3_ROPE.values()
    kept = np.clip((positions * frequencies / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / (kept + (1.0 - kept) / factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelFileError(
            f"{source.path} scales its positions by a {_ROPE_FACTORS} that is not LLaMA 3's, which is not "
            "supported from GGUF; use the model's Hugging Face directory"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _tensors(source: _Source, config: dict[str, object], progress: Progress) -> Iterator[tuple[str, Array]]:
    num_tensors = len(source.reader.tensors)
    for index, tensor in enumerate(source.reader.tensors):
        progress("dequantising tensors", 0.9 * index / num_tensors)
        if tensor.name == _ROPE_FACTORS:
            continue  # in the configuration
        name = _name(source, tensor.name)
        values = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if source.architecture == "llama" and name.endswith("q_proj.weight"):
            values = _unpermute(values, cast("int", config["num_attention_heads"]))
        elif source.architecture == "llama" and name.endswith("k_proj.weight"):
            values = _unpermute(values, cast("int", config["num_key_value_heads"]))
        yield name, np.ascontiguousarray(values)


def _name(source: _Source, name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_TENSOR.match(name)
    target = _layer_names(source.architecture).get(match.group(2)) if match else None
    if match is None or target is None:
        raise ModelFileError(
            f"{source.path} has a tensor {name!r}, which a plain {source.architecture} model does not have"
        )
    return f"model.layers.{match.group(1)}.{target}"


def _layer_names(architecture: str) -> dict[str, str]:
    """Tensors of a layer: in GGUF -> in the directory."""
    weights = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _LAYER.items()}
    return weights | _EXTRA.get(architecture, {})


def _unpermute(weight: Array, num_heads: int) -> Array:
    """GGUF stores a LLaMA's rows of q and k [heads * head_dim, hidden] for interleaved rotation: pairs
    (2i, 2i + 1) of a head back to (i, i + head_dim / 2)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _check_complete(source: _Source, tensors: dict[str, Array], config: dict[str, object]) -> None:
    for name in _expected_names(source.architecture, cast("int", config["num_hidden_layers"])):
        if name not in tensors:  # the first one ends it: a damaged file may promise any number of layers
            raise ModelFileError(f"{source.path} lacks the tensor {name}; download it again")


def _expected_names(architecture: str, num_layers: int) -> Iterator[str]:
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    for layer in range(num_layers):
        yield from (f"model.layers.{layer}.{name}" for name in _layer_names(architecture).values())
