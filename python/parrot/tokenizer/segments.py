"""Segmented prompts to token ids, equal to those of the whole prompt tokenised at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..wire import Ids
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of prompt text. With ``control``, control strings in it (``<|im_start|>``) become control tokens:
    chat template glue, constants of a raw prompt. Without, they stay text: values, message contents."""

    text: str
    control: bool = False


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """``token_ids`` int32 [n]; ``boundaries`` int32, ascending prefix lengths b, 0 < b <= n, of which no later
    text can change the ids: one for each end of a piece, and one every 128 tokens."""

    token_ids: Ids
    boundaries: Ids


class PromptEncoder:
    """Encodes prompts piece by piece and remembers what it encoded (a bounded LRU, by content).

    May be used by several threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None: ...

    def encode(self, pieces: Sequence[Piece], *, continues: bool = False) -> EncodedPrompt:
        """Ids of the concatenated pieces, with exactly one BOS if the model wants one.

        With ``continues`` the text follows ids that were generated: no BOS, no space put before it."""
