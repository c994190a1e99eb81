"""The bytes of single ids: joined, they are the bytes of the text."""

from __future__ import annotations

import pytest
import tokenizers

from parrot.tokenizer import TokenBytes
from tiny_models import CORPUS, byte_level_tokenizer, sentencepiece_tokenizer


@pytest.mark.parametrize("backend", [byte_level_tokenizer(), sentencepiece_tokenizer()])
def test_the_bytes_of_the_ids_of_a_text_are_its_own(backend: tokenizers.Tokenizer) -> None:
    token_bytes = TokenBytes(backend)
    for text in [*CORPUS, "日本 🙂 \x00\x7f naïve"]:
        ids = backend.encode(text, add_special_tokens=False).ids
        joined = b"".join(token_bytes[token] for token in ids).decode()
        assert joined in (text, f" {text}")  # SentencePiece puts a space before a text


def test_added_tokens_are_themselves_and_ids_beyond_the_vocabulary_are_nothing() -> None:
    backend = byte_level_tokenizer()
    token_bytes = TokenBytes(backend)
    assert token_bytes[backend.token_to_id("<|im_start|>")] == b"<|im_start|>"
    assert token_bytes[10**6] == b""
