"""Random two-layer models with small trained tokenizers, as Hugging Face directories."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what they'd do, isn't it?",
    "Python's pydoc_data.topics carries a chapter on assignment statements: x[0] = y.z += 12345",
    "def main():\n    for i in range(10):\n        print(f'{i}: {i ** 2}')\n\n\nmain()\n",
    "  Leading spaces,\ttabs and\r\nline  ends;   many   spaces    in a row.\n\n \n",
    "Grüße aus Köln, naïve café, 你好，世界。 Привет, мир! 😀🎉 ñandú",
    "<|im_start|>user\nWrite a summary of {{input:text}}<|im_end|>",
    "we'll see, they've said, I'm sure you're right, he'd know; 'll 's 't",
] * 3
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE of about 500 tokens, with the pre-tokenizer of SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    """LLaMA 2's kind: BPE with byte fallback over a whole run, a space put before it, BOS added."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    control = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*control, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=90,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in control]
    spec["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer, **config: object) -> Path:
    """tokenizer.json and tokenizer_config.json (``config``), in a new or existing directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_tiny_model(
    directory: Path,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    num_layers: int = 2,
    head_dim: int = 16,
    tied: bool = False,
    seed: int = 0,
    **config: object,
) -> Path:
    """By default two layers, hidden size 64, weights scaled so that logits differ clearly; fp32."""
    tokenizer = byte_level_tokenizer()
    vocab, hidden, intermediate = tokenizer.get_vocab_size(), 64, 160
    description = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        "dtype": "float32",
        **config,
    }
    write_tokenizer(directory, tokenizer, eos_token="<|im_end|>", chat_template=CHATML)
    (directory / "config.json").write_text(json.dumps(description))
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    if not tied:
        shapes["lm_head"] = (vocab, hidden)
    for layer in range(num_layers):
        shapes |= {
            f"model.layers.{layer}.input_layernorm": (hidden,),
            f"model.layers.{layer}.self_attn.q_proj": (num_heads * head_dim, hidden),
            f"model.layers.{layer}.self_attn.k_proj": (num_kv_heads * head_dim, hidden),
            f"model.layers.{layer}.self_attn.v_proj": (num_kv_heads * head_dim, hidden),
            f"model.layers.{layer}.self_attn.o_proj": (hidden, num_heads * head_dim),
            f"model.layers.{layer}.post_attention_layernorm": (hidden,),
            f"model.layers.{layer}.mlp.gate_proj": (intermediate, hidden),
            f"model.layers.{layer}.mlp.up_proj": (intermediate, hidden),
            f"model.layers.{layer}.mlp.down_proj": (hidden, intermediate),
        }
    save_file(_random_tensors(shapes, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            values = rng.uniform(0.5, 1.5, shape)
        else:
            scale = 1.0 if name == "model.embed_tokens" else 2.0 / np.sqrt(shape[1])
            values = rng.normal(0.0, scale, shape)
        tensors[f"{name}.weight"] = values.astype(np.float32)
    return tensors


_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_OPT_SIZES = {
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {  # name -> configuration class of transformers, fields
    "llama-biases": ("LlamaConfig", {**_SIZES, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {**_SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen2-tied": ("Qwen2Config", {**_SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 32}),
    "opt": ("OPTConfig", {**_OPT_SIZES, "dropout": 0.0}),
}


def write_family(directory: Path, family: str, **changed: object) -> Path:
    """A model of one of ``FAMILIES``, with some fields ``changed``, as transformers writes it, with weights
    that make logits differ."""
    import torch
    import transformers

    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer, eos_token="<|im_end|>", chat_template=CHATML)
    name, fields = FAMILIES[family]
    fields = {**fields, **changed}
    ids = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    config = getattr(transformers, name)(vocab_size=tokenizer.get_vocab_size(), **ids, **fields)
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = 1.0 if "embed" in parameter_name else 2.0 * parameter.shape[1] ** -0.5
                parameter.normal_(0.0, scale, generator=generator)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    model.save_pretrained(directory)
    return directory
