"""JSON of bodies: what Python's parser stumbles over without a place is said with one, and what it would take
long for is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from ..errors import InvalidRequest

MAX_VALUES = 2**18  # strings, numbers, lists, ...: the ids of a prompt are the most that a body needs
_LARGE_BYTES = 2**20  # takes the parser 3 ms, or 50 if it is all lists


def read_json(raw: bytes) -> Any:
    """As ``json.loads``, but a whole number of more than 4,300 digits, of which that makes a ValueError
    without a place, is an infinite one, which no field takes, and the encoding is UTF-8. Raises ValueError
    for what is not JSON, a UnicodeDecodeError for what is not UTF-8, and RecursionError."""
    text = raw.decode().removeprefix("\ufeff")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # such a number
        return json.loads(text, parse_int=_number)


def unreadable(error: UnicodeDecodeError | RecursionError) -> str:
    """What is wrong with a body, or a part of one, whose reading ended so."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"not valid UTF-8 at byte {error.start}"


def check_is_json(request: Request) -> None:
    """Raise :class:`InvalidRequest` for a body that is not said to be JSON: a page of another site could send
    a form, or text, without asking."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        came = f"with Content-Type {kind!r:.100}" if kind else "without a Content-Type"
        raise InvalidRequest(
            f"the body came {came}; send it with the header 'Content-Type: application/json'",
            param="Content-Type",
        )


def num_values(raw: bytes) -> int:
    """How many values and names JSON has, about; more than :data:`MAX_VALUES` are not counted to the end.
    Takes a tenth of the time in which they are read."""
    num_marks = _num_marks(raw)  # in its strings too
    if num_marks <= MAX_VALUES:
        return num_marks
    bare = raw.replace(rb"\\", b"").replace(rb"\"", b"")  # of the quotes, those that end a string are left
    num_strings = bare.count(b'"') // 2
    if num_strings > MAX_VALUES:
        return num_strings
    outside = b"".join(bare.split(b'"')[::2])
    return _num_marks(outside)


def _num_marks(raw: bytes) -> int:
    return sum(raw.count(mark) for mark in (b",", b":", b"[", b"{"))


def _read_large(raw: bytes) -> Any:
    """As :func:`read_json`, in a thread. The parser keeps the interpreter's lock, but for what it calls."""
    if num_values(raw) > MAX_VALUES:
        # The exception that FastAPI lets through; of others it says that there was one.
        raise HTTPException(413, f"the body has more than {MAX_VALUES} values, the limit")
    return json.loads(raw.decode().removeprefix("\ufeff"), parse_int=_number)


def _number(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:
        return float(digits)


class _JsonRequest(Request):
    async def json(self) -> Any:
        raw = await self.body()
        try:
            return await asyncio.to_thread(_read_large, raw) if len(raw) > _LARGE_BYTES else read_json(raw)
        except (UnicodeDecodeError, RecursionError) as error:
            raise HTTPException(400, f"the body is {unreadable(error)}") from None


class JsonRoute(APIRoute):
    """A route whose body, if it takes one, is read so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, with another request."""
        handler = super().get_route_handler()
        takes_body = self.body_field is not None

        async def handle(request: Request) -> Response:
            if takes_body:
                check_is_json(request)
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle
