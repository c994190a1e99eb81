"""One timed run of an application against a service, with what the service says about its calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpx

import parrot as P

from ..api import CallsReply, CallView, EnginesReply, EngineView
from ..errors import Unavailable
from ..timeline import Phase, Track
from .network import RoundTrip

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_READY_S = 120.0
_SETTLE_S = 2.0  # a call is listed once its engine says that it left, shortly after its value arrived


@dataclass(frozen=True, slots=True)
class Run:
    """``texts`` are all outputs in the order of their calls, the answer last. Times are microseconds of
    CLOCK_MONOTONIC, which client and manager share on one machine. ``num_requests`` are those that the client
    sent for the answer."""

    texts: tuple[str, ...]
    begin_us: int
    end_us: int
    calls: tuple[CallView, ...]
    num_requests: int

    @property
    def makespan_s(self) -> float:
        """From before the first request to the answer in the client's hands."""
        return (self.end_us - self.begin_us) / 1e6

    @property
    def runnable_us(self) -> int:
        """From when its first call could run to when its last one had finished."""
        ready = [call.timing.ready_us for call in self.calls if call.timing.ready_us is not None]
        finished = [call.timing.finished_us for call in self.calls if call.timing.finished_us is not None]
        return max(finished) - min(ready)


def start_service(network: RoundTrip) -> str:
    """The URL of an embedded service with a ready engine; this process's Parrot client reaches it over
    ``network``. Raises :class:`SetupError` if it cannot start."""
    url = P.connect(transport=network).url
    deadline = time.monotonic() + _READY_S
    while httpx.get(url + "/ready", trust_env=False).status_code != 200:
        if time.monotonic() > deadline:
            raise Unavailable(f"no engine was ready after {_READY_S:g} s; try `parrot doctor`")
        time.sleep(0.1)
    return url


def run_parrot(url: str, application: Callable[[], list[P.SemanticVariable]], network: RoundTrip) -> Run:
    """Time ``application``, whose last variable is the answer; the other outputs are fetched afterwards.
    ``network`` is that of :func:`start_service`."""
    num_before = network.num_requests
    begin_us = time.monotonic_ns() // 1000
    variables = application()
    variables[-1].get(perf=P.LATENCY)
    end_us = time.monotonic_ns() // 1000
    num_requests = network.num_requests - num_before
    texts = P.gather(*variables)
    return Run(texts, begin_us, end_us, wait_for_calls(url, begin_us, len(texts)), num_requests)


def run_twin(
    url: str,
    application: Callable[[AsyncOpenAI], Awaitable[list[str]]],
    network: RoundTrip,
) -> Run:
    """Time ``application``, which returns all outputs, the answer last; its client, a new one, sends through
    ``network``."""
    from openai import AsyncOpenAI

    async def run() -> tuple[int, list[str], int]:
        # The openai client takes httpx clients whichever HTTP package its own version types them with.
        http: Any = httpx.AsyncClient(transport=network, timeout=600)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
            begin_us = time.monotonic_ns() // 1000
            texts = await application(client)
            return begin_us, texts, time.monotonic_ns() // 1000

    num_before = network.num_requests
    begin_us, texts, end_us = asyncio.run(run())
    num_requests = network.num_requests - num_before
    return Run(tuple(texts), begin_us, end_us, wait_for_calls(url, begin_us, len(texts)), num_requests)


def warm_up(url: str, example: ModuleType, network: RoundTrip) -> None:
    """A short run of ``example`` (``with_parrot``, ``with_openai``) from both clients, so that whoever goes
    first later pays for no import, connection or first step of an engine."""
    outputs = P.Output(max_tokens=8, ignore_eos=True)
    run_parrot(url, lambda: example.with_parrot("Warm-up", ["text"], outputs), network)
    run_twin(url, lambda client: example.with_openai(client, "Warm-up", ["text"], outputs), RoundTrip(0))


def wait_for_calls(url: str, since_us: int, count: int) -> tuple[CallView, ...]:
    """The calls submitted since ``since_us``, in the order in which they became ready, once ``count`` have
    ended; fewer if they do not appear."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        calls = [call for call in ended_calls(url) if call.timing.submitted_us >= since_us]
        if len(calls) >= count or time.monotonic() > deadline:
            return tuple(sorted(calls, key=_ready_order))
        time.sleep(0.02)


def ended_calls(url: str) -> tuple[CallView, ...]:
    """Recently ended calls of all sessions, oldest first."""
    return CallsReply.model_validate_json(_fetch(url + "/v1/calls")).calls


def engine_views(url: str) -> tuple[EngineView, ...]:
    """The engines with their counters."""
    return EnginesReply.model_validate_json(_fetch(url + "/v1/engines")).engines


def to_track(run: Run, title: str, note: str, rtt_us: int, *, one_trip: bool) -> Track:
    """A run as a track of the timeline. With ``one_trip`` the client's round trip is paid once, around the
    whole run; otherwise around every call."""
    half_us = rtt_us // 2
    trips: dict[str, tuple[Phase, ...]] = {}
    for index, call in enumerate(run.calls):
        begin_us, end_us = call.timing.submitted_us, call.timing.finished_us or call.timing.submitted_us
        sent = Phase("network", begin_us - half_us, begin_us)
        received = Phase("network", end_us, end_us + half_us)
        is_last = index == len(run.calls) - 1
        kept = [sent] * (not one_trip or index == 0) + [received] * (not one_trip or is_last)
        trips[call.request_id] = tuple(phase for phase in kept if half_us > 0)
    return Track(title, note, run.calls, run.begin_us, run.end_us, trips)


def _ready_order(call: CallView) -> tuple[int, int]:
    timing = call.timing
    return (timing.ready_us or timing.submitted_us, timing.admitted_us or timing.submitted_us)


def _fetch(url: str) -> bytes:
    response = httpx.get(url, trust_env=False, timeout=10.0)
    response.raise_for_status()
    return response.content
