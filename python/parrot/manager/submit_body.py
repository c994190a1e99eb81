"""The body of a submit, from JSON to :class:`parrot.api.SubmitBody`, call by call.

The largest legal body is decoded and checked in slices of the loop's time: a first pass finds where each call
begins and ends (about a millisecond per MiB, in one piece), and then each is decoded on its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from .. import api
from ..config import ManagerConfig
from ..errors import InvalidRequest, RequestTooLarge
from .http_errors import invalid_request
from .json_body import read_json, unreadable

SCHEMAS = "#/components/schemas/"
MAX_ITEMS = 65536  # variables, and labels; calls have a limit of their own
_SMALL_BYTES = 2**20  # a body that is worth a second look for a better message
_FIELD = re.compile(r"`\$\.?([^`]*)`\Z|unknown field `([^`]*)`|required field `([^`]*)`")

B = TypeVar("B", bound=BaseModel)
Items = Sequence[msgspec.Raw]


_PARTS = ("variables", "calls", "labels")
# A SubmitBody whose parts are still JSON.
_Envelope = msgspec.defstruct(
    "_Envelope",
    [
        (name, list[msgspec.Raw], []) if name in _PARTS else (name, Any, msgspec.UNSET)
        for name in api.SubmitBody.model_fields
    ],
    forbid_unknown_fields=True,
)
_decoder = msgspec.json.Decoder(_Envelope)


def reading(raw: bytes, config: ManagerConfig) -> Generator[None, None, api.SubmitBody]:
    """Read a body; yields between its parts (:mod:`parrot.manager.slices`).

    Raises :class:`InvalidRequest` naming the field, or :class:`RequestTooLarge` for more calls, variables,
    sources or labels than one submit may have."""
    try:
        envelope = msgspec.structs.asdict(_decoder.decode(raw))
    except (msgspec.DecodeError, RecursionError) as error:
        raise _explained(raw, error) from None
    parts: dict[str, Items] = {name: envelope.pop(name) for name in _PARTS}
    for name in _PARTS:
        limit = config.max_calls_per_submit if name == "calls" else MAX_ITEMS
        if len(parts[name]) > limit:
            raise RequestTooLarge(
                f"{len(parts[name])} {name} in one submit, the limit is {limit}", param=name
            )
    yield
    given = {name: value for name, value in envelope.items() if value is not msgspec.UNSET}
    head = _validated(api.SubmitBody, given)
    meter = _Meter(config)
    variables = yield from _each("variables", parts["variables"], api.VariableBody, meter)
    calls = yield from _each("calls", parts["calls"], api.CallBody, meter)
    labels = yield from _each("labels", parts["labels"], api.LabelBody, meter)
    body = head.model_copy(update={"variables": variables, "calls": calls, "labels": labels})
    return body.came_as(raw)


def documented_body(model: type[BaseModel]) -> dict[str, Any]:
    """What a route that reads its body itself says of it in the OpenAPI document (``openapi_extra``)."""
    schema = {"$ref": f"{SCHEMAS}{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def schemas_of(model: type[BaseModel]) -> dict[str, Any]:
    """The schemas that such a body needs among the document's components."""
    schema = model.model_json_schema(ref_template=SCHEMAS + "{model}")
    parts: dict[str, Any] = schema.pop("$defs", {})
    return {**parts, model.__name__: schema}


class _Meter:
    """What all parts of one submit may have together, counted before it is validated, which takes longer."""

    def __init__(self, config: ManagerConfig) -> None:
        self._config = config
        self._num_sources = 0
        self._num_transforms = 0
        self._num_pattern_chars = 0
        self._patterns: set[str] = set()

    def add(self, value: Any, where: str) -> None:
        """Count one variable or call. Raises :class:`RequestTooLarge`."""
        self._num_sources += len(_list_of(value, "sources"))
        limit = self._config.max_sources_per_submit
        if self._num_sources > limit:
            raise RequestTooLarge(
                f"the variables of one submit have more than {limit} sources in all",
                param=f"{where}.sources",
            )
        for place, transforms in _chains(value, where):
            self._add_chain(place, transforms)

    def _add_chain(self, place: str, transforms: list[Any]) -> None:
        config = self._config
        self._num_transforms += len(transforms)
        if self._num_transforms > config.max_transforms_per_submit:
            raise RequestTooLarge(
                f"one submit has more than {config.max_transforms_per_submit} transforms in all", param=place
            )
        for transform in transforms:
            pattern = _field_of(transform, "pattern") or _field_of(transform, "path")
            if isinstance(pattern, str) and pattern not in self._patterns:
                self._patterns.add(pattern)
                self._num_pattern_chars += len(pattern)
        if self._num_pattern_chars > config.max_pattern_chars_per_submit:
            raise RequestTooLarge(
                "the different patterns and paths of one submit have more than "
                f"{config.max_pattern_chars_per_submit} characters in all",
                param=place,
            )


def _chains(value: Any, where: str) -> Iterator[tuple[str, list[Any]]]:
    """The transforms in a variable or a call, whatever else is wrong with it, and where they are."""
    yield f"{where}.transforms", _list_of(value, "transforms")
    for name in ("sources", "placeholders"):
        for index, part in enumerate(_list_of(value, name)):
            transforms = _list_of(part, "transforms")
            if transforms:
                yield f"{where}.{name}.{index}.transforms", transforms


def _field_of(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _list_of(value: Any, name: str) -> list[Any]:
    found = _field_of(value, name)
    return found if isinstance(found, list) else []


def _each(name: str, items: Items, model: type[B], meter: _Meter) -> Generator[None, None, tuple[B, ...]]:
    read: list[B] = []
    for index, item in enumerate(items):
        value = _decoded(name, index, item)
        meter.add(value, f"{name}.{index}")
        read.append(_validated(model, value, name, index))
        yield
    return tuple(read)


def _decoded(name: str, index: int, item: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(item)
    except (msgspec.DecodeError, RecursionError) as error:
        where = f"{name}.{index}"
        try:  # the standard library reads what is not quite JSON, and validation can tell which field it is
            return read_json(bytes(item))
        except (UnicodeDecodeError, RecursionError) as reason:
            raise InvalidRequest(f"{where}: its JSON is {unreadable(reason)}", param=where) from None
        except ValueError:
            raise InvalidRequest(f"{where}: {_reason(error)}", param=where) from None


def _validated(model: type[B], value: Any, *place: str | int) -> B:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_request({**item, "loc": (*place, *item["loc"])} for item in error.errors()) from None


def _explained(raw: bytes, error: Exception) -> InvalidRequest:
    """What is wrong with a body that msgspec does not read, with the field if that can be found out."""
    if isinstance(error, RecursionError):
        return InvalidRequest(f"the body is {unreadable(error)}")
    try:
        if str(error).startswith("Invalid UTF-8"):
            raw.decode()  # raises what has the place
        if len(raw) <= _SMALL_BYTES:
            api.SubmitBody.model_validate(read_json(raw))
    except ValidationError as findings:
        return invalid_request(findings.errors())
    except json.JSONDecodeError as reason:
        return InvalidRequest(f"body: not JSON at character {reason.pos}: {reason.msg}")
    except (UnicodeDecodeError, RecursionError) as reason:
        return InvalidRequest(f"the body is {unreadable(reason)}")
    found = _FIELD.search(str(error))
    param = next((group for group in found.groups() if group), None) if found is not None else None
    return InvalidRequest(f"{param or 'body'}: {_reason(error)}", param=param)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"not what was expected: {str(error)[:200]}"
