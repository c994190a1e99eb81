"""JSON of bodies: what Python's parser stumbles over without a place is said with one."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute


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


def _number(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:
        return float(digits)


class _JsonRequest(Request):
    async def json(self) -> Any:
        raw = await self.body()
        try:
            return read_json(raw)
        except (UnicodeDecodeError, RecursionError) as error:
            # The exception that FastAPI lets through; of others it says that there was one.
            raise HTTPException(400, f"the body is {unreadable(error)}") from None


class JsonRoute(APIRoute):
    """A route whose body is read so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, with another request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle
