"""An emulated network between a client and the service, so that both run on one machine.

Half a round trip passes before a request arrives, half before its answer is back. A client that orchestrates
its calls itself pays both halves on every request (:class:`RoundTrip`). An application of Parrot pays one
round trip in all: its get travels with the submit, so the first half goes before the submit and the second
before the answer of the get (:class:`SharedRoundTrip`).
"""

from __future__ import annotations

import asyncio
import json

import httpx


class RoundTrip(httpx.AsyncBaseTransport):
    """Half of ``rtt_s`` seconds before each request and half after its answer; ``num_requests`` were sent."""

    def __init__(self, rtt_s: float, inner: httpx.AsyncBaseTransport | None = None) -> None:
        self.num_requests = 0
        self._half_s = rtt_s / 2
        self._inner = inner or httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` over the emulated network."""
        self.num_requests += 1
        await asyncio.sleep(self._half_s)
        response = await self._inner.handle_async_request(request)
        await asyncio.sleep(self._half_s)
        return response

    async def aclose(self) -> None:
        """Close the real transport."""
        await self._inner.aclose()


class SharedRoundTrip(RoundTrip):
    """Half of ``rtt_s`` before each submit, half after the answer of each get. A get that asks again for a
    variable, because its long poll ended first, does not travel with a submit and pays both halves."""

    def __init__(self, rtt_s: float, inner: httpx.AsyncBaseTransport | None = None) -> None:
        super().__init__(rtt_s, inner)
        self._asked: set[str] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` over the emulated network."""
        self.num_requests += 1
        is_get = request.url.path.endswith("/get")
        if not is_get or self._is_repeated(request):
            await asyncio.sleep(self._half_s)
        response = await self._inner.handle_async_request(request)
        if is_get:
            await asyncio.sleep(self._half_s)
        return response

    def _is_repeated(self, request: httpx.Request) -> bool:
        variable = str(json.loads(request.content)["semantic_var_id"])
        repeated = variable in self._asked
        self._asked.add(variable)
        return repeated
