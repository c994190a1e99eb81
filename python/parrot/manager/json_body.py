"""Bodies with whole numbers that Python does not read: the check of the field says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute


def read_json(raw: bytes) -> Any:
    """As ``json.loads``, but a whole number of more than 4,300 digits, of which that makes a ValueError
    without a place, is an infinite one, which no field takes. Raises ValueError for what is not JSON."""
    try:
        return json.loads(raw)
    except json.JSONDecodeError:
        raise
    except ValueError:  # such a number, or not UTF-8
        return json.loads(raw, parse_int=_number)


def _number(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:
        return float(digits)


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


class JsonRoute(APIRoute):
    """A route whose body is read so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, with another request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle
