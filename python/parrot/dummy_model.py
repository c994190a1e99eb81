"""Model directories without weights, for timing: the shape of a known model and a synthetic tokenizer.

Every id of that tokenizer is one word, so that a text of n words is n tokens in every service that loads it,
and what a model with random weights generates is text that its consumers encode into the same ids again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from .errors import ConfigError, SetupError

_LLAMA: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def _sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, positions: int
) -> dict[str, object]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


# Positions of the LLaMA shapes are more than the models were trained on: the paper's prompts are longer.
SHAPES: Mapping[str, Mapping[str, object]] = {
    "llama-7b": {**_LLAMA, **_sizes(32000, 4096, 11008, 32, 32, 32, 65536)},
    "llama-13b": {**_LLAMA, **_sizes(32000, 5120, 13824, 40, 40, 40, 65536)},
    "llama3-8b": {**_LLAMA, **_sizes(128256, 4096, 14336, 32, 32, 8, 65536), "rope_theta": 500000.0},
    "qwen3-0.6b": {
        **_LLAMA,
        **_sizes(151936, 1024, 3072, 28, 16, 8, 40960),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {**_LLAMA, **_sizes(1024, 64, 160, 2, 4, 2, 8192)},
}
_UNKNOWN, _BOS, _EOS = "<unk>", "<s>", "</s>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_CONTROL = (_UNKNOWN, _BOS, _EOS, *_ROLES)
_CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def word(token_id: int) -> str:
    """The text of a token, for ids from ``num_control_tokens()`` on."""
    return f"w{token_id}"


def num_control_tokens() -> int:
    """Ids below this are control tokens: unknown, BOS, EOS and the roles of a chat."""
    return len(_CONTROL)


def write_dummy_model(directory: Path, shape: str) -> Path:
    """Write config.json and the synthetic tokenizer's files into a new or empty directory.

    Engines load it with ``dummy_weights``. Raises :class:`ConfigError` for a shape that is none of
    ``SHAPES``, :class:`SetupError` for a directory that holds something else.
    """
    if shape not in SHAPES:
        raise ConfigError(f"shape = {shape!r} is none of {', '.join(SHAPES)}", param="shape")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise SetupError(f"{directory} is not empty; name a new directory", param="directory")
        config = {**SHAPES[shape], "bos_token_id": 1, "eos_token_id": 2, "dtype": "float16"}
        _write_json(directory / "config.json", config)
        _write_tokenizer(directory, int(str(config["vocab_size"])))
    except OSError as error:
        raise SetupError(f"{directory} cannot be written ({error.strerror})", param="directory") from None
    return directory


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Words between spaces, whatever they are; BOS first, as LLaMA has it."""
    mark = "▁"
    vocab = {token: i for i, token in enumerate(_CONTROL)}
    vocab |= {mark + word(i): i for i in range(len(_CONTROL), vocab_size)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=mark, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement=mark, prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _CONTROL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, vocab[_BOS])]
    )
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _BOS,
            "eos_token": _EOS,
            "unk_token": _UNKNOWN,
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT,
        },
    )


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
