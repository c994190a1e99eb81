"""Parsed prompts, kept by tenant and content: what calls with the same template have in common exists once.

A service sees few templates and many calls of each. The constants of a call are those of the table, whichever
session submitted them, so that a live call costs its bindings and not its text, and texts that are equal are
the same object, whose hash is known. Each tenant has prompts of its own: how long a submit takes tells nobody
what others submit.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..api import CallBody
from ..errors import TemplateError
from ..template import Constant, HoleKind, parse_template
from .call import Role, TextPart

CAPACITY_BYTES = 32 * 2**20
_ENTRY_OVERHEAD_BYTES = 1024

Key = str | tuple[tuple[Role, str], ...]


@dataclass(frozen=True, slots=True)
class PromptHole:
    """A hole and the index of its message; 0 for a raw prompt."""

    kind: HoleKind
    name: str
    line: int
    message: int


@dataclass(frozen=True, slots=True, eq=False)
class ParsedPrompt:
    """A prompt, or all messages of a chat, without what a call binds to it. ``steps``: what lies before each
    output, with the output; what follows the last one is in none. ``holes``: in order, a name once for each
    time that it is read; ``inputs`` and ``outputs`` are their names."""

    roles: tuple[Role, ...] | None
    steps: tuple[tuple[tuple[TextPart | PromptHole, ...], PromptHole], ...]
    holes: tuple[PromptHole, ...]
    inputs: frozenset[str]
    outputs: frozenset[str]

    @property
    def num_constant_chars(self) -> int:
        """Characters of text that an engine reads, whatever is bound."""
        parts = (part for before, _ in self.steps for part in before)
        return sum(len(part.text) for part in parts if isinstance(part, TextPart))


class PromptTable:
    """Least recently used prompts, bounded by the bytes of their texts. Used on the loop only."""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._prompts: OrderedDict[tuple[int, Key], ParsedPrompt] = OrderedDict()
        self.used_bytes = 0

    def get(self, body: CallBody, *, where: str, domain: int) -> ParsedPrompt:
        """The parsed prompt of a call of this domain. Raises :class:`TemplateError` naming ``where``,
        message, hole and line."""
        key = (domain, _key(body))
        known = self._prompts.get(key)
        if known is not None:
            self._prompts.move_to_end(key)
            return known
        prompt = self._prompts[key] = _parse(body, where)
        self.used_bytes += _size(key[1])
        while self.used_bytes > self._capacity_bytes and len(self._prompts) > 1:
            oldest, _ = self._prompts.popitem(last=False)
            self.used_bytes -= _size(oldest[1])
        return prompt


def place(body: CallBody, where: str, message: int) -> str:
    """``where`` and, in a chat, the message, counted from 1: a line says nothing without it."""
    if body.messages is None:
        return where
    return f"{where}, message {message + 1} ({body.messages[message].role})"


def _key(body: CallBody) -> Key:
    if body.messages is None:
        return body.prompt or ""
    return tuple((message.role, message.content) for message in body.messages)


def _size(key: Key) -> int:
    """Bytes of the key's texts, twice: as they came, and cut into parts."""
    texts = (key,) if isinstance(key, str) else tuple(content for _, content in key)
    return _ENTRY_OVERHEAD_BYTES + 2 * sum(map(sys.getsizeof, texts))


def _parse(body: CallBody, where: str) -> ParsedPrompt:
    segments: list[TextPart | PromptHole] = []
    texts = [body.prompt or ""] if body.messages is None else [message.content for message in body.messages]
    for index, text in enumerate(texts):
        segments += (
            TextPart(segment.text, index)
            if isinstance(segment, Constant)
            else PromptHole(segment.kind, sys.intern(segment.name), segment.line, index)
            for segment in parse_template(text, where=place(body, where, index))
        )
    roles = None if body.messages is None else tuple(message.role for message in body.messages)
    holes = tuple(segment for segment in segments if isinstance(segment, PromptHole))
    if roles is not None:
        _check_across_messages(body, roles, holes, where)
    inputs, outputs = (
        frozenset(hole.name for hole in holes if hole.kind == kind) for kind in ("input", "output")
    )
    return ParsedPrompt(roles, tuple(_steps(segments)), holes, inputs, outputs)


def _steps(
    segments: Iterable[TextPart | PromptHole],
) -> Iterator[tuple[tuple[TextPart | PromptHole, ...], PromptHole]]:
    waiting: list[TextPart | PromptHole] = []
    for segment in segments:
        if isinstance(segment, PromptHole) and segment.kind == "output":
            yield tuple(waiting), segment
            waiting = []
        else:
            waiting.append(segment)


def _check_across_messages(
    body: CallBody, roles: tuple[Role, ...], holes: Iterable[PromptHole], where: str
) -> None:
    """What parse_template checks within one template, for all messages together, and where outputs may be."""
    seen: set[tuple[str, str]] = set()
    for hole in holes:
        if hole.kind == "output":
            here = f"{place(body, where, hole.message)}, line {hole.line}: output {hole.name!r}"
            if roles[hole.message] != "assistant":
                raise TemplateError(f"{here} belongs in an assistant message", param=hole.name)
            if ("output", hole.name) in seen:
                raise TemplateError(f"{here} appears a second time", param=hole.name)
            if ("input", hole.name) in seen:
                raise TemplateError(f"{here} is read before it is produced", param=hole.name)
        seen.add((hole.kind, hole.name))
