"""Splits a run of literal text at its last safe cut: ids that no later text can change, and the rest."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tokenizers

from ..wire import Ids
from .layout import SPACE_MARK, CutKind, TokenizerLayout
from .tokenizer import Tokenizer

NO_IDS: Ids = np.empty(0, dtype=np.int32)
LONG_TEXT = 4096  # characters; about a millisecond
UNSTABLE_PRETOKENS = 2  # a contraction or white space may still grow from the last two into one


class Cut(NamedTuple):
    """``token_ids`` of a prefix of a text, which begin the encoding whatever follows the text, and the
    ``rest`` of the text. ``rest_ids``: those of the rest if nothing follows it; None: they are not known."""

    token_ids: Ids
    rest: str
    rest_ids: Ids | None = None


Splitter = Callable[[str, bool], Cut]
"""From the text of a run, from its start or from a cut, and whether it gets a space put before it."""


def make_splitter(tokenizer: Tokenizer) -> Splitter:
    """The splitter for this tokenizer's kind of cuts."""
    layout = tokenizer.layout
    if layout.cut_kind is CutKind.PRETOKENS:
        return lambda text, at_start: _split_pretokens(tokenizer, text, at_start)
    if layout.cut_kind is CutKind.WHOLE:
        return lambda text, _: Cut(NO_IDS, text)
    find_cut = _last_space if layout.cut_kind is CutKind.SPACES else _last_unjoinable

    def split(text: str, at_start: bool) -> Cut:
        cut = find_cut(layout, text)
        return Cut(encode_run(tokenizer, text[:cut], at_start), text[cut:])

    return split


def encode_run(tokenizer: Tokenizer, text: str, at_start: bool) -> Ids:
    """Ids of literal text, int32 [n]; ``at_start`` puts a space before it if the tokenizer does so."""
    if not text:
        return NO_IDS
    backend = tokenizer.literal if at_start else tokenizer.literal_middle
    return np.array(_encode(backend, text).ids, dtype=np.int32)


def _encode(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    if len(text) < LONG_TEXT:
        return backend.encode(text, add_special_tokens=False)
    # encode holds the interpreter lock for all of it, encode_batch does not.
    return backend.encode_batch([text], add_special_tokens=False)[0]


def _split_pretokens(tokenizer: Tokenizer, text: str, at_start: bool) -> Cut:
    if not text:
        return Cut(NO_IDS, text, NO_IDS)
    backend = tokenizer.literal if at_start else tokenizer.literal_middle
    encoding = _encode(backend, text)
    composes = tokenizer.layout.composes
    num_unstable = 0
    # Asked one by one: of a long text only the last few matter, and all of them as a list take milliseconds.
    for index in range(len(encoding) - 1, 0, -1):
        if encoding.token_to_word(index) == encoding.token_to_word(index - 1):
            continue
        num_unstable += 1
        cut = (encoding.token_to_chars(index) or (0, 0))[0]
        if num_unstable >= UNSTABLE_PRETOKENS and cut > 0 and not (composes and _may_compose(text[cut])):
            ids = np.array(encoding.ids, dtype=np.int32)
            return Cut(ids[:index], text[cut:], ids[index:].copy())
    return Cut(NO_IDS, text, np.array(encoding.ids, dtype=np.int32))


def _may_compose(char: str) -> bool:
    """Whether canonical composition may join this character with those before it, or change their order:
    marks, Hangul jamo, and the planes of scripts in which vowel signs count as letters."""
    if char.isascii():
        return False
    return (
        unicodedata.category(char).startswith("M")
        or "\u1100" <= char <= "\u11ff"
        or "\U00011000" <= char <= "\U00016fff"
    )


def _last_space(_: TokenizerLayout, text: str) -> int:
    return max(text.rfind(" "), 0)


def _last_unjoinable(layout: TokenizerLayout, text: str) -> int:
    """The last position between two characters that no token holds side by side."""
    known = layout.known_chars
    for cut in range(len(text) - 1, 0, -1):
        pair = text[cut - 1 : cut + 1].replace(" ", SPACE_MARK)
        if pair not in layout.joinable and (known is None or (pair[0] in known and pair[1] in known)):
            return cut
    return 0
