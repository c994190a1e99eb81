"""Typed outputs: from what a program calls a type to the constraint that the service enforces, and from the
text that comes back to a value of that type."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from ..errors import TypedOutputFailed

Parse = Callable[[str], Any]
_UNTYPED = (str, Any, None, type(None), object)


class Typed:
    """A type of output. ``schema`` (JSON schema) or ``choices`` is what its text must be; ``parse`` turns
    the text into a value, and raises :class:`TypedOutputFailed` if the type refuses it."""

    def __init__(
        self, name: str, parse: Parse, *, schema: dict[str, Any] | None = None, choices: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.schema = schema
        self.choices = choices
        self._parse = parse

    def parse(self, text: str) -> Any:
        """The value that the text says."""
        try:
            return self._parse(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            reason = f"{where}: {first['msg']}" if where else str(first["msg"])
        except (ValueError, RecursionError) as error:
            reason = str(error)
        raise TypedOutputFailed(
            f"an output of type {self.name} came as text that is none: {reason}; the text was {text!r:.200}, "
            "and .get(raw=True) gives it whole"
        )


def from_schema(schema: object) -> Typed:
    """The type that ``schema=`` names: a JSON schema, a pydantic model, or any type that pydantic knows.
    Raises :class:`TypeError`."""
    if isinstance(schema, Mapping):
        return Typed("JSON", json.loads, schema=dict(schema))
    return _from_type(schema, f"schema={schema!r:.100}")


def from_annotation(annotation: object, where: str) -> Typed | None:
    """The type that a return annotation asks for, or None for text. Raises :class:`TypeError`."""
    if annotation in _UNTYPED or getattr(annotation, "__name__", "") in ("SemanticVariable", "Outputs"):
        return None
    return _from_type(annotation, f"{where}: -> {getattr(annotation, '__name__', annotation)}")


def _from_type(annotation: Any, where: str) -> Typed:
    name = getattr(annotation, "__name__", str(annotation))
    if get_origin(annotation) is Literal and all(isinstance(choice, str) for choice in get_args(annotation)):
        return Typed(str(annotation), str, choices=get_args(annotation))
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        schema = adapter.json_schema()
    except Exception as error:  # pydantic's errors of this kind have no common base
        raise TypeError(
            f"{where}: no JSON schema can be made of it ({type(error).__name__}: {error}); give a pydantic "
            "model, a JSON schema, or a type such as int or list[str]"
        ) from None
    return Typed(name, adapter.validate_json, schema=schema)
