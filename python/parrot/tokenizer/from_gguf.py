"""The tokenizer inside a GGUF file, as the contents of tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Protocol, cast

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import ModelFileError
from .layout import LLAMA3_SPLIT, QWEN2_SPLIT, SPACE_MARK

_BYTE_LEVEL_SPLITS: Mapping[str, str | None] = {  # tokenizer.ggml.pre -> regular expression; None: GPT-2's
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": LLAMA3_SPLIT,
    "llama3": LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT,
}
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Metadata(Protocol):
    """Reads one metadata field; None if the file does not have it."""

    def __call__(self, key: str) -> object: ...


def tokenizer_files(metadata: Metadata, where: str) -> dict[str, str]:
    """File name -> contents. Raises :class:`ModelFileError` naming ``where`` for an unknown tokenizer."""
    tokens = cast("list[str] | None", metadata("tokenizer.ggml.tokens"))
    if not tokens:
        raise ModelFileError(f"{where} has no tokenizer (tokenizer.ggml.tokens); use another file")
    types = cast("list[int]", metadata("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens))
    kind, pre = metadata("tokenizer.ggml.model"), metadata("tokenizer.ggml.pre") or "default"
    if kind == "gpt2" and pre in _BYTE_LEVEL_SPLITS:
        tokenizer = _byte_level(tokens, cast("list[str]", metadata("tokenizer.ggml.merges") or []), str(pre))
    elif kind == "llama":
        scores = cast("list[float]", metadata("tokenizer.ggml.scores") or [0.0] * len(tokens))
        adds_space = metadata("tokenizer.ggml.add_space_prefix") is not False
        tokenizer = _sentencepiece(tokens, scores, types, adds_space=adds_space)
    else:
        raise ModelFileError(
            f"{where} has a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}, which is not supported; "
            "use the model's Hugging Face directory"
        )
    _add_special_tokens(tokenizer, tokens, types)
    config = _config(metadata, tokens, default_add_bos=kind == "llama")
    if config["add_bos_token"]:
        _add_bos(tokenizer, str(config["bos_token"]))
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2),
    }


def _byte_level(tokens: Sequence[str], merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [cast("tuple[str, str]", tuple(merge.split(" ", 1))) for merge in merges]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre in ("llama-bpe", "llama3")))
    split = _BYTE_LEVEL_SPLITS[pre]
    first: list[pre_tokenizers.PreTokenizer] = []
    if pre == "smollm":
        first.append(pre_tokenizers.Digits(individual_digits=True))
    if split is not None:
        first.append(pre_tokenizers.Split(tokenizers.Regex(split), "isolated"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, adds_space: bool
) -> tokenizers.Tokenizer:
    """BPE with merges in the order of the scores of what they make, as SentencePiece applies them."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [
        (-scores[i], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for i, token in enumerate(tokens)
        if types[i] == TokenType.NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort()
    pairs = [(left, right) for *_, left, right in merges]
    unknown = "<unk>" if "<unk>" in vocab else None
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    marks: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    if adds_space:
        marks.insert(0, normalizers.Prepend(SPACE_MARK))
    tokenizer.normalizer = normalizers.Sequence(marks)
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _add_special_tokens(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    special = [
        t for t, kind in zip(tokens, types, strict=True) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    others = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in others])


def _config(metadata: Metadata, tokens: Sequence[str], *, default_add_bos: bool) -> dict[str, object]:
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config["clean_up_tokenization_spaces"] = False
    for key, role in _ROLES.items():
        token_id = metadata(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            config[role] = tokens[token_id]
    add_bos = metadata("tokenizer.ggml.add_bos_token")
    config["add_bos_token"] = "bos_token" in config and (
        default_add_bos if add_bos is None else bool(add_bos)
    )
    template = metadata("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    length = metadata(f"{metadata('general.architecture')}.context_length")
    if isinstance(length, int):
        config["model_max_length"] = length
    return config


def _add_bos(tokenizer: tokenizers.Tokenizer, bos: str) -> None:
    bos_id = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, bos_id)]
    )
