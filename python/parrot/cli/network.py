"""An emulated network between a client and the service, so that both run on one machine.

Half a round trip passes before a request arrives, half before its answer is back. A client that orchestrates
its calls itself pays both halves for every call that waits for another; an application of Parrot pays them
once, since its get travels beside the submit.
"""

from __future__ import annotations

import asyncio

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
