"""Until the sessions of the journal are back, requests wait, as they would for a service that starts."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from .auth import OPEN, OPERATORS


class Gate:
    """ASGI middleware, inside :class:`Auth`: probes and what operators look at are answered at any time."""

    def __init__(self, app: ASGIApp, opened: asyncio.Event) -> None:
        self._app = app
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._opened.is_set() and scope["type"] == "http" and scope["path"] not in OPEN | OPERATORS:
            await self._opened.wait()
        await self._app(scope, receive, send)
