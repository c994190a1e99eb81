"""A tokenizer of made-up words, one id each: what is generated and read again has the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from .layout import SPACE_MARK

CONTROL = ("<unk>", "<s>", "</s>")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def word(index: int) -> str:
    """The word of one number: distinct for distinct numbers, three letters or more."""
    letters: list[str] = []
    number = index
    while number or len(letters) < 3:
        number, letter = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(reversed(letters))


def write_synthetic_tokenizer(directory: Path, *, vocab_size: int = 32_000, max_positions: int) -> Path:
    """A directory with tokenizer.json, tokenizer_config.json and what config.json says of lengths and ids.

    Words stand apart by one space; a text of n of them has n ids behind <s>, and a space more is an id more.
    """
    vocab = {token: index for index, token in enumerate((*CONTROL, SPACE_MARK))}
    for index in range(vocab_size - len(vocab)):
        vocab[SPACE_MARK + word(index)] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(
        directory / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        add_bos_token=True,
    )
    _write(directory / "config.json", vocab_size=vocab_size, max_position_embeddings=max_positions)
    return directory


def _write(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(fields))
