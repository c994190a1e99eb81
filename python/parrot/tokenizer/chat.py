"""Chat templates, rendered in a sandbox around messages whose contents are not known yet."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import Tokenizer


def render_chat(
    tokenizer: Tokenizer, roles: Sequence[str], *, add_generation_prompt: bool
) -> list[str | int]:
    """The chat as control text (str) and places of contents (int: index of the message).

    Raises :class:`InvalidRequest` if the model has no chat template or the template refuses these roles."""
