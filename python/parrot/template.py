"""Prompt templates: constant text with named holes, ``{{input:name}}`` and ``{{output:name}}``.

Both the front end (to report errors with a line) and the manager (which never trusts the client's parse)
use this module. ``{{output}}`` names the single, unnamed output ``output``. Text in double braces that does
not begin with a word and a colon, such as a JSON example, is constant text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .errors import TemplateError

HoleKind = Literal["input", "output"]
# One way to match each text: a second optional run of spaces would take cubic time on a long one.
_HOLE = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*(?::([^{}]*))?\}\}")
_SINGLE_BRACES = re.compile(r"(?<!\{)\{\s*(?:input|output)\s*(?::[^{}]*)?\}(?!\})")
_MAX_SHOWN = 80
_NAME = re.compile(r"[A-Za-z_]\w{0,127}\Z")


@dataclass(frozen=True, slots=True)
class Constant:
    """A run of constant text, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Hole:
    """A variable of the template. ``line`` counts from 1 within the template."""

    kind: HoleKind
    name: str
    line: int


Segment = Constant | Hole


def parse_template(text: str, *, where: str = "template") -> tuple[Segment, ...]:
    """Split a template into segments, in order.

    Raises :class:`TemplateError` naming ``where``, the hole and the line for an unknown kind of hole, a bad
    name, an output that appears twice, or a name used both as input and as output after its input.
    """
    segments: list[Segment] = []
    outputs: dict[str, int] = {}
    inputs: dict[str, int] = {}
    position = 0
    line = 1
    for match in _HOLE.finditer(text):
        line += text.count("\n", position, match.start())
        hole = _hole(match, line, where)
        if match.start() > position:
            segments.append(Constant(text[position : match.start()]))
        _check_names(hole, inputs, outputs, where)
        segments.append(hole)
        line += text.count("\n", match.start(), match.end())
        position = match.end()
    if position < len(text):
        segments.append(Constant(text[position:]))
    return tuple(segments)


def no_output_reason(text: str) -> str:
    """What is wrong with a template that has no output."""
    hint = single_brace_hint(text)
    return "the template has no {{output:name}}" + (f", and {hint}" if hint else "")


def single_brace_hint(text: str) -> str | None:
    """What is wrong with the first hole in single braces, if there is one."""
    found = _SINGLE_BRACES.search(text)
    if found is None:
        return None
    single = found.group(0)
    return (
        f"{single} has single braces and is no hole: "
        f"write double braces, {{{single}}}; in an f-string {{{{{{{single}}}}}}}"
    )


def _hole(match: re.Match[str], line: int, where: str) -> Hole:
    kind, name = match.group(1), match.group(2)
    text = match.group(0)
    shown = repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
    if kind not in ("input", "output"):
        raise TemplateError(
            f"{where}, line {line}: {shown} is not a hole; write {{{{input:name}}}} or {{{{output:name}}}}"
        )
    name = "output" if name is None and kind == "output" else (name or "").strip()
    if not _NAME.match(name):
        raise TemplateError(f"{where}, line {line}: {shown} needs a name of letters, digits and underscores")
    return Hole("input" if kind == "input" else "output", name, line)


def _check_names(hole: Hole, inputs: dict[str, int], outputs: dict[str, int], where: str) -> None:
    if hole.kind == "output":
        if hole.name in outputs:
            raise TemplateError(
                f"{where}, line {hole.line}: output {hole.name!r} appears a second time "
                f"(first on line {outputs[hole.name]}); to read it, write {{{{input:{hole.name}}}}}"
            )
        if hole.name in inputs:
            raise TemplateError(
                f"{where}, line {hole.line}: output {hole.name!r} is read on line {inputs[hole.name]}, "
                "before it is produced"
            )
        outputs[hole.name] = hole.line
    else:
        inputs.setdefault(hole.name, hole.line)
