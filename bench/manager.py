"""The manager under load: the parts of a call's life, the hop from producer to consumer, and what calls and
sessions cost it.

The second half runs a manager process and a simulated engine (:mod:`bench.timed_engine`) on the real wire and
a client, all on this machine. Processor time is that of all threads of the manager's process.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import manager_parts
from .service_load import (
    CALL_TOKENS,
    HttpClient,
    ManagerProcess,
    batch_body,
    chain_body,
    new_session_id,
    simulated_service,
)
from .timed_engine import Counts, TimedEngine
from .timing import percentile_us, print_table, show, spread

CHAIN = 20
BATCH = 64
SESSION_CALLS = 8
MEDIAN_INFERENCE_S = 1.0
_COLUMNS = ("p50_ms", "p99_ms", "cpu")


@dataclass(frozen=True, slots=True)
class Sizes:
    """``rates`` are calls per second at which latency is looked at, each for ``rate_s``."""

    parts: manager_parts.Sizes
    repeats: int
    num_sessions: int
    num_batches: int
    live_sessions: int
    rates: tuple[int, ...]
    rate_s: float


QUICK = Sizes(manager_parts.QUICK, 1, 30, 16, 200, (200, 500), 3.0)
FULL = Sizes(manager_parts.FULL, 5, 100, 64, 1000, (250, 500, 750, 1000, 1500, 2000, 2500, 3000), 6.0)


def run(quick: bool) -> dict[str, Any]:
    """Measure and print everything."""
    sizes = QUICK if quick else FULL
    parts = manager_parts.measure(sizes.parts)
    with simulated_service() as (manager, (engine,)):
        asyncio.run(_chains(manager, 2, 2))
        hops = _hops(manager, engine, sizes)
        calls = _calls(manager, sizes)
    with simulated_service(step_s=10.0) as (manager, _):
        memory = asyncio.run(_session_bytes(manager, sizes))
    # Otherwise what latency-bound calls allow on one engine is reached long before the manager's limits.
    options = ("--off", "objective_aware")
    with simulated_service(step_s=MEDIAN_INFERENCE_S / CALL_TOKENS, options=options) as (manager, (engine,)):
        asyncio.run(_chains(manager, 2, 1))
        rates = _rates(manager, engine, sizes)
    _print(sizes, hops, calls, memory, rates)
    return {"parts": parts, "hops": hops, "calls": calls, "session_bytes": memory, "rates": rates}


def _hops(manager: ManagerProcess, engine: TimedEngine, sizes: Sizes) -> list[dict[str, Any]]:
    """From a producer's reply to its consumer's dispatch: one session alone, and many."""
    rows = []
    for num_sessions in (1, sizes.num_sessions):
        p50, p99, cpu = [], [], []
        for _ in range(sizes.repeats):
            engine.take()
            before_s = manager.cpu_s
            asyncio.run(_chains(manager, num_sessions, 3))
            counts = engine.take()
            p50.append(percentile_us(counts.hops_ns, 50) / 1000)
            p99.append(percentile_us(counts.hops_ns, 99) / 1000)
            cpu.append((manager.cpu_s - before_s) * 1e6 / counts.num_dispatches)
        row = {"p50_ms": spread(p50), "p99_ms": spread(p99), "cpu_us_per_call": spread(cpu)}
        rows.append({"sessions": num_sessions, **row})
    return rows


async def _chains(manager: ManagerProcess, num_sessions: int, rounds: int) -> None:
    """Sessions that each run chains back to back; they begin one after the other within one call."""

    async def session(index: int) -> None:
        client = await HttpClient.connect(manager.port)
        await asyncio.sleep(0.05 * index / num_sessions)
        for _ in range(rounds):
            session_id = new_session_id()
            await client.post("/v1/submit", chain_body(session_id, CHAIN))
            await client.post("/v1/get", {"session_id": session_id, "semantic_var_id": f"v-{CHAIN - 1}"})
            await client.request("DELETE", f"/v1/session/{session_id}")
        client.close()

    await asyncio.gather(*map(session, range(num_sessions)))


def _calls(manager: ManagerProcess, sizes: Sizes) -> dict[str, Any]:
    """Processor time of the manager for a call's whole life, in submits of 64, one after the other."""

    async def batches() -> None:
        client = await HttpClient.connect(manager.port)
        for _ in range(sizes.num_batches):
            session_id = new_session_id()
            await client.post("/v1/submit", batch_body(session_id, BATCH))
            await client.post("/v1/get", {"session_id": session_id, "semantic_var_id": f"v-{BATCH - 1}"})
            await client.request("DELETE", f"/v1/session/{session_id}")
        client.close()

    asyncio.run(batches())
    costs = []
    for _ in range(sizes.repeats):
        before_s = manager.cpu_s
        asyncio.run(batches())
        costs.append((manager.cpu_s - before_s) * 1e6 / (sizes.num_batches * BATCH))
    return {"cpu_us": spread(costs), "calls": sizes.num_batches * BATCH}


async def _session_bytes(manager: ManagerProcess, sizes: Sizes) -> dict[str, Any]:
    """Resident memory that a live session takes: half of its calls run, half wait for their inputs."""
    client = await HttpClient.connect(manager.port)

    async def fill(num_sessions: int) -> None:
        for _ in range(num_sessions):
            session_id = new_session_id()
            await client.post("/v1/submit", _half_running(session_id))

    await fill(sizes.live_sessions // 4)
    before = manager.memory_bytes
    await fill(sizes.live_sessions)
    await asyncio.sleep(1)
    grown = manager.memory_bytes - before
    client.close()
    return {"bytes": round(grown / sizes.live_sessions), "sessions": sizes.live_sessions}


def _half_running(session_id: str) -> dict[str, Any]:
    body = batch_body(session_id, SESSION_CALLS // 2)
    waiting = chain_body(session_id, SESSION_CALLS)["calls"][SESSION_CALLS // 2 :]
    return {**body, "calls": [*body["calls"], *waiting]}


def _rates(manager: ManagerProcess, engine: TimedEngine, sizes: Sizes) -> list[dict[str, Any]]:
    """Rising rates, up to the first that is not kept."""
    rows: list[dict[str, Any]] = []
    for rate in sizes.rates:
        rows.append(asyncio.run(_at_rate(manager, engine, rate, sizes.rate_s)))
        print(f"{rate} calls/s: {rows[-1]['achieved']} achieved, p50 {rows[-1]['p50_ms']:.1f} ms", flush=True)
        if rows[-1]["p50_ms"] > 20 * MEDIAN_INFERENCE_S:
            break
    return rows


async def _at_rate(manager: ManagerProcess, engine: TimedEngine, rate: int, for_s: float) -> dict[str, Any]:
    """The manager's latency while chains of calls of a second arrive at random, ``rate`` calls a second."""
    rng = random.Random(rate)
    engine.take()
    length = 4
    tasks: list[asyncio.Task[None]] = []
    clients: list[HttpClient] = []
    began = due = time.perf_counter()
    before_s = manager.cpu_s
    while due < began + for_s:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        client = clients.pop() if clients else await HttpClient.connect(manager.port)
        tasks.append(asyncio.create_task(_one_chain(client, length, clients.append)))
        due += rng.expovariate(rate / length)
    await asyncio.gather(*tasks)
    took_s = time.perf_counter() - began
    counts: Counts = engine.take()
    for client in clients:
        client.close()
    return {
        "rate": rate,
        "achieved": round(counts.num_dispatches / took_s),
        "p50_ms": percentile_us(counts.hops_ns, 50) / 1000,
        "p99_ms": percentile_us(counts.hops_ns, 99) / 1000,
        "cpu": (manager.cpu_s - before_s) / took_s,
    }


async def _one_chain(client: HttpClient, length: int, give_back: Callable[[HttpClient], None]) -> None:
    session_id = new_session_id()
    await client.request("POST", "/v1/submit", json.dumps(chain_body(session_id, length)).encode())
    await client.post("/v1/get", {"session_id": session_id, "semantic_var_id": f"v-{length - 1}"})
    await client.request("DELETE", f"/v1/session/{session_id}")
    give_back(client)


Row = dict[str, Any]


def _print(sizes: Sizes, hops: list[Row], calls: Row, memory: Row, rates: list[Row]) -> None:
    print_table(
        f"reply of the producer to dispatch of the consumer, ms; median (least to most) of {sizes.repeats}",
        ("sessions", "p50", "p99", "manager us per call"),
        [
            (f"{row['sessions']}", show(row["p50_ms"]), show(row["p99_ms"]), show(row["cpu_us_per_call"], 0))
            for row in hops
        ],
    )
    print(f"manager, processor time of a call in submits of {BATCH}: {show(calls['cpu_us'], 0)} us")
    print(f"a live session of {SESSION_CALLS} calls x 2 KB: {memory['bytes'] / 1024:.1f} KB")
    print_table(
        "calls of 1 s in chains of 4, arriving at random; the manager's latency is the hop",
        ("calls/s", "achieved", "p50 ms", "p99 ms", "manager cores"),
        [
            (f"{row['rate']:,}", f"{row['achieved']:,}", *(f"{row[key]:.2f}" for key in _COLUMNS))
            for row in rates
        ],
    )
    limit_ms = MEDIAN_INFERENCE_S * 10
    for name in ("p50_ms", "p99_ms"):
        over = next((row["rate"] for row in rates if row[name] > limit_ms), None)
        reached = f"at {over:,} calls/s" if over is not None else f"above {rates[-1]['rate']:,} calls/s"
        print(f"{name[:3]} of the hop passes 1 % of a median inference ({limit_ms:.0f} ms) {reached}")
