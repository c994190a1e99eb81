"""Noticing that a client has left while its answer is still being made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from .json_body import check_is_json

T = TypeVar("T")
_LARGE_BYTES = 2**21


class ClientLeft(Exception):
    """The client closed its connection; nobody reads the answer any more."""


async def whole_body(request: Request) -> bytes:
    """The body of a request whose route reads JSON itself. Raises :class:`ClientLeft`, and
    :class:`InvalidRequest` for one that is not said to be JSON."""
    check_is_json(request)
    pieces: list[bytes] = []
    try:
        async for piece in request.stream():
            pieces.append(piece)
    except ClientDisconnect:
        raise ClientLeft from None
    if sum(map(len, pieces)) < _LARGE_BYTES:
        return b"".join(pieces)
    return await asyncio.to_thread(b"".join, pieces)  # which does not need the interpreter's lock


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; if the client leaves first, ``work`` is cancelled and :class:`ClientLeft`
    raised. The request's body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        for pending in (task, watch):
            if not pending.done():
                pending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pending
