"""The body of a semantic function as a prompt: its text or messages, and its holes in order.

A body is one of: a docstring with holes; a returned template string; a returned list of messages
(:func:`system`, :func:`user`, :func:`assistant`). A body that returns its template is called once, with a
:class:`Marker` for each parameter: a marker formats as its hole, so f-strings work, and has no value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from ..errors import TemplateError, UnknownPlaceholder
from ..template import Hole, no_output_reason, parse_template
from .options import did_you_mean

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat prompt; ``content`` is a template."""

    role: Role
    content: str


def system(content: str | Marker) -> Message:
    """A system message."""
    return Message("system", str(content))


def user(content: str | Marker) -> Message:
    """A user message."""
    return Message("user", str(content))


def assistant(content: str | Marker) -> Message:
    """An assistant message; usually ``P.assistant("{{output:answer}}")``."""
    return Message("assistant", str(content))


class Marker:
    """Stands for a parameter while a body builds its template: formats as ``{{input:name}}``, and refuses to
    be asked for a value, since the template is the same for every call."""

    __slots__ = ("_name", "_where")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str, where: str) -> None:
        self._name = name
        self._where = where

    def __str__(self) -> str:
        return f"{{{{input:{self._name}}}}}"

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse(f"formatted with {spec!r}")
        return str(self)

    def __add__(self, other: object) -> str:
        return str(self) + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + str(self)

    def __bool__(self) -> bool:
        self._refuse("tested")

    def __len__(self) -> int:
        self._refuse("measured")

    def __eq__(self, other: object) -> bool:
        self._refuse("compared")

    def __iter__(self) -> NoReturn:
        self._refuse("iterated over")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"asked for .{name}")

    def _refuse(self, action: str) -> NoReturn:
        raise TemplateError(
            f"{self._where}: the body is called once, to build the template, so parameter {self._name!r} "
            f"has no value there and cannot be {action}; put it into the template as it is",
            param=self._name,
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked prompt: ``text`` or ``messages``, unrendered. ``inputs`` and ``outputs`` map each name to
    where its first hole is, in words, in order of appearance; an output that is read again later is no
    input."""

    text: str | None
    messages: tuple[Message, ...] | None
    inputs: dict[str, str]
    outputs: dict[str, str]


def text_prompt(text: str, where: str) -> Prompt:
    """A prompt of one template. ``where`` begins every error message."""
    holes = _holes(text, where)
    return Prompt(text, None, *_bind_names([(where, hole) for hole in holes], where, text))


def chat_prompt(messages: Sequence[object], where: str) -> Prompt:
    """A prompt of several messages; names are shared by all of them."""
    checked: list[Message] = []
    holes: list[tuple[str, Hole]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Message):
            raise TemplateError(
                f"{where}: item {index} of the returned list is {type(message).__name__}, "
                "not P.system(...), P.user(...) or P.assistant(...)"
            )
        place = f"{where}, message {index + 1} ({message.role})"
        for hole in _holes(message.content, place):
            if hole.kind == "output" and message.role != "assistant":
                raise TemplateError(
                    f"{place}, line {hole.line}: output {hole.name!r} belongs in an assistant message",
                    param=hole.name,
                )
            holes.append((place, hole))
        checked.append(message)
    text = "\n".join(message.content for message in checked)
    return Prompt(None, tuple(checked), *_bind_names(holes, where, text))


def _holes(text: str, where: str) -> list[Hole]:
    return [segment for segment in parse_template(text, where=where) if isinstance(segment, Hole)]


def _bind_names(
    holes: Iterable[tuple[str, Hole]], where: str, text: str
) -> tuple[dict[str, str], dict[str, str]]:
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    for template, hole in holes:
        place = f"{template}, line {hole.line}"
        if hole.kind == "input":
            if hole.name not in outputs:
                inputs.setdefault(hole.name, place)
        elif hole.name in outputs or hole.name in inputs:
            earlier = "produced twice" if hole.name in outputs else "read before it is produced"
            raise TemplateError(f"{place}: output {hole.name!r} is {earlier}", param=hole.name)
        else:
            outputs[hole.name] = place
    if not outputs:
        raise TemplateError(f"{where}: {no_output_reason(text)}")
    return inputs, outputs


def check_parameters(prompt: Prompt, parameters: Sequence[str], where: str) -> None:
    """Raise :class:`UnknownPlaceholder` unless input holes and parameters name the same things. A parameter
    may also name an output: the variable passed for it is then produced by the call."""
    for name, place in prompt.inputs.items():
        if name not in parameters:
            raise UnknownPlaceholder(
                f"{place}: {{{{input:{name}}}}} is not a parameter; "
                f"parameters: {', '.join(parameters) or 'none'}{did_you_mean(name, parameters)}",
                param=name,
            )
    for name in parameters:
        if name not in prompt.inputs and name not in prompt.outputs:
            raise UnknownPlaceholder(
                f"{where}: parameter {name!r} appears in no hole; write {{{{input:{name}}}}} or remove it",
                param=name,
            )
