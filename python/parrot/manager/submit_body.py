"""The body of a submit, from JSON to :class:`parrot.api.SubmitBody`, call by call.

The largest legal body is decoded and checked in slices of the loop's time: a first pass finds where each call
begins and ends (about a millisecond per MiB, in one piece), and then each is decoded on its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from .. import api
from ..config import ManagerConfig
from ..errors import InvalidRequest, RequestTooLarge
from .http_errors import invalid_request

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
    variables = yield from _each("variables", parts["variables"], api.VariableBody)
    _check_sources(variables, config.max_sources_per_submit)
    calls = yield from _each("calls", parts["calls"], api.CallBody)
    labels = yield from _each("labels", parts["labels"], api.LabelBody)
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


def _check_sources(variables: Sequence[api.VariableBody], limit: int) -> None:
    num_sources = 0
    for index, variable in enumerate(variables):
        num_sources += len(variable.sources or ())
        if num_sources > limit:
            raise RequestTooLarge(
                f"the variables of one submit have more than {limit} sources in all",
                param=f"variables.{index}.sources",
            )


def _each(name: str, items: Items, model: type[B]) -> Generator[None, None, tuple[B, ...]]:
    read: list[B] = []
    for index, item in enumerate(items):
        read.append(_validated(model, _decoded(name, index, item), name, index))
        yield
    return tuple(read)


def _decoded(name: str, index: int, item: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(item)
    except (msgspec.DecodeError, RecursionError) as error:
        where = f"{name}.{index}"
        try:  # the standard library reads what is not quite JSON, and validation can tell which field it is
            return json.loads(bytes(item))
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{where}: {_reason(error)}", param=where) from None


def _validated(model: type[B], value: Any, *place: str | int) -> B:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_request({**item, "loc": (*place, *item["loc"])} for item in error.errors()) from None


def _explained(raw: bytes, error: Exception) -> InvalidRequest:
    """What is wrong with a body that msgspec does not read, with the field if that can be found out."""
    if len(raw) <= _SMALL_BYTES:
        try:
            api.SubmitBody.model_validate(json.loads(raw))
        except ValidationError as findings:
            return invalid_request(findings.errors())
        except json.JSONDecodeError as reason:
            return InvalidRequest(f"body: not JSON at character {reason.pos}: {reason.msg}")
        except (ValueError, RecursionError):  # not UTF-8, a number of thousands of digits
            pass
    found = _FIELD.search(str(error))
    param = next((group for group in found.groups() if group), None) if found is not None else None
    return InvalidRequest(f"{param or 'body'}: {_reason(error)}", param=param)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"not what was expected: {str(error)[:200]}"
