"""The operators of transforms (docs/transforms.md), each a body with its ``op``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .common import FIRST_ONLY, Body, Flag, Text


class Strip(Body):
    """Remove white space (or ``chars``) at both ends, of each item if it is a list."""

    op: Literal["strip"] = "strip"
    chars: str | None = Field(default=None, max_length=64)


class Regex(Body):
    """First match of ``pattern`` (RE2 syntax); the value becomes ``group``: 0 = all, a number, a name. With
    ``every`` it becomes the list of that group in all matches, which may be empty."""

    op: Literal["regex"] = "regex"
    pattern: str = Field(max_length=1024)
    group: int | Text = 0
    every: Flag = False


class JsonPath(Body):
    """Parse the value as JSON (a fenced block is unwrapped) and take what ``path`` selects first."""

    op: Literal["json"] = "json"
    path: str = Field(default="$", max_length=1024)


class Split(Body):
    """Split text into a list at ``separator``; empty items are dropped unless ``keep_empty``. With ``quoted``
    the text is CSV: lines end items too, and an item in double quotes may contain separators."""

    op: Literal["split"] = "split"
    separator: str = Field(min_length=1, max_length=256)
    keep_empty: Flag = False
    quoted: Flag = False

    @model_validator(mode="after")
    def _quoted_needs_one_character(self) -> Split:
        if self.quoted and (len(self.separator) > 1 or self.separator in '\r\n" '):
            raise ValueError(
                "with quoted, the separator is one character other than a space, a quote or a line end"
            )
        return self


class Item(Body):
    """One item of a list, negative from the end, or one value of an object by key."""

    op: Literal["item"] = "item"
    index: int | Text


class Join(Body):
    """Join the items of a list into text."""

    op: Literal["join"] = "join"
    separator: str = Field(default="\n", max_length=256)


class Template(Body):
    """Put the value into ``text`` at every ``{{value}}``."""

    op: Literal["template"] = "template"
    text: str = Field(max_length=65536)


class Lines(Body):
    """The lines of a text as a list, without white space at both ends; empty lines are dropped. ``bullets``
    also removes what begins the item of a list: ``-``, ``*``, ``+``, a bullet, ``1.`` or ``1)``."""

    op: Literal["lines"] = "lines"
    bullets: Flag = False


class ToNumber(Body):
    """Text that is a decimal number (``-1``, ``2.50``, ``1e3``, ``1,234``) as a number; also each item."""

    op: Literal["to-number"] = "to-number"


class Default(Body):
    """``value`` instead, if an operator before it failed or the value is null or empty."""

    op: Literal["default"] = "default"
    value: Text = Field(max_length=65536)


Transform = Annotated[
    Strip | Regex | JsonPath | Split | Item | Join | Template | Lines | ToNumber | Default,
    Field(discriminator="op"),
]
Transforms = Annotated[tuple[Transform, ...], FIRST_ONLY, Field(max_length=32)]
