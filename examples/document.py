"""The document that the summary examples read: a file, or a long chapter that every CPython carries."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import pairwise
from pathlib import Path

from parrot.models import resolve_model
from parrot.tokenizer import Tokenizer

DEFAULT_CHAPTER = "compound"  # "Compound statements" of the Python language reference, 50,000 characters
_UNDERLINE = re.compile(r"^[*=\-~^\"']{3,}$", re.MULTILINE)
_WRAPPED = re.compile(r"(?<=\S)\n(?=\S)")


def load_text(file: Path | None = None) -> str:
    """The text of ``file``, or of the default chapter without its heading underlines and line wrapping."""
    if file is not None:
        return file.read_text()
    chapter: str = import_module("pydoc_data.topics").topics[DEFAULT_CHAPTER]
    paragraphs = re.sub(r"\n{3,}", "\n\n", _UNDERLINE.sub("", chapter))
    return _WRAPPED.sub(" ", paragraphs).strip()


def split_text(text: str, model: str, num_chunks: int, chunk_tokens: int) -> list[str]:
    """At most ``num_chunks`` consecutive pieces of ``text``, of ``chunk_tokens`` tokens of ``model`` each."""
    offsets = Tokenizer.load(resolve_model(model)).backend.encode(text, add_special_tokens=False).offsets
    ends = (min(begin + chunk_tokens, len(offsets)) for begin in range(0, len(offsets), chunk_tokens))
    cuts = [0, *(offsets[end][0] if end < len(offsets) else len(text) for end in ends)]
    return [text[begin:end] for begin, end in pairwise(cuts[: num_chunks + 1])]
