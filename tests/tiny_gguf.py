"""A Hugging Face directory written as GGUF, the way that llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as GGUF's llama architecture stores them."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    directory: Path,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    leave_out: str | None = None,
    untyped_factor: str = "",
) -> Path:
    """Norms and biases stay fp32; ``leave_out``: a tensor (GGUF name) to omit. Scaled positions are written
    as llama.cpp has them: a linear factor as metadata, those of LLaMA 3 as a factor for each frequency.
    ``untyped_factor``: the field that a linear one stands in, as in older files that do not say its type."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    add_byte_level_tokenizer(writer, directory)
    if untyped_factor:
        writer.add_float32(f"{architecture}.{untyped_factor}", config["rope_scaling"]["factor"])
    else:
        _add_rope_scaling(writer, config)
    for name, values in load_file(directory / "model.safetensors").items():
        if architecture == "llama" and name.endswith("q_proj.weight"):
            values = permute(values, config["num_attention_heads"])
        elif architecture == "llama" and name.endswith("k_proj.weight"):
            values = permute(values, config["num_key_value_heads"])
        target = _gguf_name(name)
        if target == leave_out:
            continue
        if values.ndim == 1 or quantization == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, values)
        else:
            writer.add_tensor(target, gguf.quants.quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope_scaling(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    if scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif scaling["rope_type"] == "llama3":
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
        plain = config["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"])
        writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))


def _gguf_name(name: str) -> str:
    name, kind = name.rsplit(".", 1)
    if name in _TOP:
        return f"{_TOP[name]}.{kind}"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def add_byte_level_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    """The tokenizer of the tiny models: SmolLM2's pre-tokenizer, three control tokens first."""
    spec = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(config["chat_template"])
