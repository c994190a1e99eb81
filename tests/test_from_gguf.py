"""Tokenizers out of GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parrot.errors import ModelFileError
from parrot.tokenizer import Tokenizer
from parrot.tokenizer.from_gguf import TokenType, tokenizer_files
from parrot.tokenizer.layout import CutKind
from tiny_models import byte_level_tokenizer, sentencepiece_tokenizer

TEXTS = ["The quick brown fox", "  two  spaces\n", "naïve 你好 😀", "<s>not control</s>", ""]


def load(directory: Path, metadata: dict[str, object]) -> Tokenizer:
    for name, content in tokenizer_files(metadata.get, "m.gguf").items():
        (directory / name).write_text(content)
    return Tokenizer.load(directory)


def sentencepiece_metadata() -> dict[str, object]:
    """Tokens with scores in the order of the merges, as SentencePiece models have them."""
    model = json.loads(sentencepiece_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [TokenType.BYTE if token.startswith("<0x") else TokenType.NORMAL for token in tokens[3:]]
    rank = {left + right: i for i, (left, right) in reversed(list(enumerate(model["merges"])))}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(rank.get(token, 1e6)) for token in tokens],
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_gives_the_ids_of_the_original(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_metadata())
    for text in TEXTS:
        expected = sentencepiece_tokenizer()
        expected.encode_special_tokens = True
        assert tokenizer.encode(text).tolist() == expected.encode(text, add_special_tokens=False).ids
        expected.encode_special_tokens = False
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (1, True, {2})
    assert tokenizer.layout.cut_kind is CutKind.PAIRS
    assert tokenizer.backend.encode("a").ids[0] == 1
    assert tokenizer.decode(tokenizer.encode("naïve 你好")) == "naïve 你好"


def test_sentencepiece_without_a_leading_space(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {**sentencepiece_metadata(), "tokenizer.ggml.add_space_prefix": False})
    first = tokenizer.backend.id_to_token(int(tokenizer.encode("quick")[0]))
    assert not first.startswith("▁")


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2"])
def test_byte_level_pre_tokenizers_are_understood(tmp_path: Path, pre: str) -> None:
    model = json.loads(byte_level_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokenizer = load(
        tmp_path,
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
            "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(tokens) - 3)],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.add_bos_token": True,
        },
    )
    assert tokenizer.layout.cut_kind is CutKind.PRETOKENS
    assert tokenizer.add_bos
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "t5"},
        {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "unheard-of"},
    ],
)
def test_an_unknown_tokenizer_is_refused(metadata: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=r"m\.gguf"):
        tokenizer_files(metadata.get, "m.gguf")
