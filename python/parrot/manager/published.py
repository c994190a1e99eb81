"""Prompt templates that the operator published: the only text whose KV tenants share (docs/kvcache.md).

Public is the constant text that such a template begins with, up to its first hole: in every prompt that
begins with all of it, whoever wrote that. A prompt that has only a part of it has nothing in common with
other tenants, and one that goes on with text of its own nothing more.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ..api import MessageBody
from ..errors import ConfigError, InvalidRequest, TemplateError
from ..template import Hole, parse_template
from ..tokenizer import Piece, Tokenizer, render_chat
from .call import Role

log = logging.getLogger(__name__)

Template = str | tuple[MessageBody, ...]
_FILE = TypeAdapter(tuple[Template, ...])
# Half surrogates: the encoder refuses text that has one, so that no prompt can forge these.
_CONTROL, _LITERAL = "\ud800", "\ud801"


@dataclass(frozen=True, slots=True)
class PublishedTemplate:
    """The constant beginning of a template. ``roles``: None for a raw prompt; ``texts``: one for each
    message, up to the one with the first hole; ``has_hole``: the last of them ends there."""

    roles: tuple[Role, ...] | None
    texts: tuple[str, ...]
    has_hole: bool


class PublishedTemplates:
    """What the operator published: prompts, or messages, of semantic functions as they are submitted."""

    def __init__(self, templates: Iterable[Template] = ()) -> None:
        """Raises :class:`ConfigError` for a text that is no template."""
        self.templates = tuple(_parse(template, number) for number, template in enumerate(templates, 1))

    @classmethod
    def load(cls, path: Path | None) -> PublishedTemplates:
        """From a JSON file: a list, each item a prompt (a string) or a list of messages with ``role`` and
        ``content``; nothing for None. Raises :class:`ConfigError` naming the file and the item."""
        if path is None:
            return cls()
        try:
            published = cls(_FILE.validate_python(json.loads(path.read_text())))
        except (OSError, ValueError) as error:
            reason = _first_error(error) if isinstance(error, ValidationError) else str(error)
            raise ConfigError(f"published templates {path}: {reason}", param="published_templates") from None
        log.info(
            "tenants share the constant beginnings of the templates in %s: %d", path, len(published.templates)
        )
        return published

    def beginnings(self, tokenizer: Tokenizer) -> Iterator[list[Piece]]:
        """The constant beginning of each template as this model's prompts have it, empty where a hole comes
        first. Raises :class:`ConfigError` for roles that the model's chat template does not take."""
        for number, template in enumerate(self.templates, 1):
            try:
                pieces = list(_pieces(template, tokenizer))
            except InvalidRequest as error:
                message = f"published template {number}: {error.message}"
                raise ConfigError(message, param="published_templates") from None
            if not any(template.texts):
                log.warning("published template %d begins with a hole: there is nothing to share", number)
                pieces = []
            yield pieces


@dataclass(frozen=True, slots=True)
class PublicPart:
    """The first ``num_pieces`` pieces of a prompt are public, and ``num_chars`` characters of the next."""

    num_pieces: int
    num_chars: int


_NOTHING = PublicPart(0, 0)


class PublicText:
    """Finds the longest published beginning of a prompt. ``settled``: how much of a control text no text
    behind it can turn into control tokens (:meth:`~parrot.tokenizer.PromptEncoder.settled_length`)."""

    def __init__(self, beginnings: Iterable[Sequence[Piece]], settled: Callable[[str], int]) -> None:
        texts = {_settle("".join(_marked(pieces)), settled) for pieces in beginnings}
        self._texts = sorted(texts - {""})
        self._longest = max(map(len, self._texts), default=0)
        self._shorter: list[int] = []  # for each text the longest other one that it begins with, or -1
        for index, text in enumerate(self._texts):
            self._shorter.append(self._last_prefix(text, index - 1))

    def find(self, pieces: Sequence[Piece]) -> PublicPart:
        """What of a prompt is public."""
        if not self._texts:
            return _NOTHING
        text = "".join(_marked(pieces, self._longest))
        found = self._last_prefix(text, bisect_right(self._texts, text) - 1)
        return _place(pieces, len(self._texts[found])) if found >= 0 else _NOTHING

    def _last_prefix(self, text: str, index: int) -> int:
        """The longest text that ``text`` begins with, by index, or -1; ``index``: the last one not above it
        in order. What ``text`` begins with lies on the way from there over ever shorter beginnings."""
        while index >= 0 and not text.startswith(self._texts[index]):
            index = self._shorter[index]
        return index


def split_at(pieces: Sequence[Piece], part: PublicPart) -> list[Piece]:
    """The pieces, cut in two where the public part ends within one."""
    if part.num_chars == 0:
        return list(pieces)
    cut = pieces[part.num_pieces]
    halves = (Piece(cut.text[: part.num_chars], cut.control), Piece(cut.text[part.num_chars :], cut.control))
    return [*pieces[: part.num_pieces], *halves, *pieces[part.num_pieces + 1 :]]


def _parse(template: Template, number: int) -> PublishedTemplate:
    roles = None if isinstance(template, str) else tuple(message.role for message in template)
    contents = [template] if isinstance(template, str) else [message.content for message in template]
    texts: list[str] = []
    try:
        for content in contents:
            segments = parse_template(content, where=f"published template {number}")
            has_hole = any(isinstance(segment, Hole) for segment in segments)
            first = segments[0] if segments else None
            texts.append("" if first is None or isinstance(first, Hole) else first.text)
            if has_hole:
                return PublishedTemplate(roles, tuple(texts), has_hole=True)
    except TemplateError as error:
        raise ConfigError(error.message, param="published_templates") from None
    return PublishedTemplate(roles, tuple(texts), has_hole=False)


def _pieces(template: PublishedTemplate, tokenizer: Tokenizer) -> Iterator[Piece]:
    if template.roles is None:
        yield Piece(template.texts[0], control=True)
        return
    for glue in render_chat(tokenizer, template.roles, add_generation_prompt=False):
        if isinstance(glue, str):
            yield Piece(glue, control=True)
            continue
        yield Piece(template.texts[glue])
        if template.has_hole and glue == len(template.texts) - 1:
            return


def _marked(pieces: Iterable[Piece], limit: int | None = None) -> Iterator[str]:
    """The text of pieces with a mark wherever control text begins or ends; at least ``limit`` characters."""
    length, control = 0, None
    for piece in pieces:
        if not piece.text:
            continue
        if piece.control != control:
            control = piece.control
            length += 1
            yield _CONTROL if control else _LITERAL
        yield piece.text if limit is None else piece.text[:limit]
        length += len(piece.text)
        if limit is not None and length >= limit:
            return


def _place(pieces: Sequence[Piece], length: int) -> PublicPart:
    """Where so many characters of the marked text end."""
    control = None
    for index, piece in enumerate(pieces):
        if not piece.text:
            continue
        if piece.control != control:
            control = piece.control
            length -= 1
        if length <= len(piece.text):
            whole = length == len(piece.text)
            return PublicPart(index + 1, 0) if whole else PublicPart(index, max(length, 0))
        length -= len(piece.text)
    return PublicPart(len(pieces), 0)


def _settle(text: str, settled: Callable[[str], int]) -> str:
    """Without an end that more control text could change, and without a mark that nothing follows."""
    start = text.rfind(_CONTROL) + 1
    if start > text.rfind(_LITERAL) + 1:
        text = text[: start + settled(text[start:])]
    return text.rstrip(_CONTROL + _LITERAL)


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
