"""The emulated network: who pays how much of a round trip."""

from __future__ import annotations

import asyncio

import httpx

from parrot.cli.network import RoundTrip
from parrot.simulation.loop import SimulatedLoop, run_simulated

RTT_S = 0.2


def took_s(num_after_another: int, num_at_once: int) -> float:
    """Simulated seconds that so many rounds of so many requests take; the service answers at once. All of
    them are counted."""
    inner = httpx.MockTransport(lambda _request: httpx.Response(200))

    async def send(loop: SimulatedLoop) -> float:
        network = RoundTrip(RTT_S, inner)
        async with httpx.AsyncClient(transport=network) as client:
            for _ in range(num_after_another):
                await asyncio.gather(*(client.get("http://service") for _ in range(num_at_once)))
            assert network.num_requests == num_after_another * num_at_once
            return loop.time()

    return run_simulated(send)


def test_requests_after_one_another_pay_a_round_trip_each() -> None:
    assert round(took_s(3, 1) / RTT_S, 3) == 3.0


def test_requests_that_travel_together_pay_one_round_trip() -> None:
    assert round(took_s(1, 3) / RTT_S, 3) == 1.0
