"""The emulated network: who pays how much of a round trip."""

from __future__ import annotations

import json

import httpx

from parrot.cli.network import RoundTrip, SharedRoundTrip
from parrot.simulation.loop import SimulatedLoop, run_simulated

RTT_S = 0.2


def took_s(transport: type[RoundTrip], *requests: tuple[str, dict[str, str]]) -> float:
    """Simulated seconds that the requests take, one after the other; the service answers at once. All of them
    are counted."""
    inner = httpx.MockTransport(lambda _request: httpx.Response(200))

    async def send(loop: SimulatedLoop) -> float:
        network = transport(RTT_S, inner)
        async with httpx.AsyncClient(transport=network) as client:
            for path, body in requests:
                await client.post(f"http://service{path}", content=json.dumps(body))
            assert network.num_requests == len(requests)
            return loop.time()

    return run_simulated(send)


def round_trips(seconds: float) -> float:
    """Rounded to a thousandth."""
    return round(seconds / RTT_S, 3)


SUBMIT = ("/v1/submit", {"session_id": "s"})


def test_an_orchestrating_client_pays_a_round_trip_per_request() -> None:
    assert round_trips(took_s(RoundTrip, ("/v1/chat/completions", {}), ("/v1/chat/completions", {}))) == 2.0


def test_a_submit_and_the_get_that_follows_pay_one_round_trip_together() -> None:
    assert round_trips(took_s(SharedRoundTrip, SUBMIT, ("/v1/get", {"semantic_var_id": "a"}))) == 1.0


def test_a_get_that_asks_again_pays_for_itself() -> None:
    get = ("/v1/get", {"semantic_var_id": "a"})
    assert round_trips(took_s(SharedRoundTrip, SUBMIT, get, get)) == 2.0
