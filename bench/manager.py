"""The manager under load: the parts of a call's life, the hop from producer to consumer, what calls and
sessions cost it, and latency against rate. Each part is printed when it is done, and ``--only`` runs some.

Most parts run a manager process and a simulated engine (:mod:`bench.timed_engine`) on the real wire and a
client, all on this machine. Processor time is that of all threads of the manager's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import manager_parts, manager_rate
from .service_load import (
    SHORT,
    HttpClient,
    ManagerProcess,
    batch_body,
    chain_body,
    new_session_id,
    simulated_service,
)
from .timed_engine import TimedEngine
from .timing import of_repeats, percentile_us, print_table, show, spread

CHAIN = 20
BATCH = 64
SESSION_CALLS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """``repeats`` are those of the calls; hops have ``hop_repeats`` of ``hop_rounds`` chains a session."""

    parts: manager_parts.Sizes
    rate: manager_rate.Sizes
    repeats: int
    hop_repeats: int
    hop_rounds: int
    num_sessions: int
    num_batches: int
    live_sessions: int


QUICK = Sizes(manager_parts.QUICK, manager_rate.QUICK, 1, 1, 2, 30, 16, 200)
FULL = Sizes(manager_parts.FULL, manager_rate.FULL, 5, 9, 3, 100, 64, 1000)


def run(quick: bool, *, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print everything, or the parts that are named."""
    sizes = QUICK if quick else FULL
    return {name: MEASURES[name](sizes) for name in PARTS if only is None or name in only}


def _hops(sizes: Sizes) -> list[dict[str, Any]]:
    """From a producer's reply to its consumer's dispatch: one session alone, and many."""
    with simulated_service() as (manager, (engine,)):
        asyncio.run(_chains(manager, 2, 2))
        rows = [_hop_row(manager, engine, number, sizes) for number in (1, sizes.num_sessions)]
    print_table(
        f"producer's reply to consumer's dispatch, ms; {of_repeats(sizes.hop_repeats)}",
        ("sessions", "p50", "p99", "CPU us a call"),
        [
            (f"{row['sessions']}", show(row["p50_ms"]), show(row["p99_ms"]), show(row["cpu_us_per_call"], 0))
            for row in rows
        ],
    )
    return rows


def _hop_row(manager: ManagerProcess, engine: TimedEngine, num_sessions: int, sizes: Sizes) -> dict[str, Any]:
    p50, p99, cpu = [], [], []
    for _ in range(sizes.hop_repeats):
        engine.take()
        before_s = manager.cpu_s
        asyncio.run(_chains(manager, num_sessions, sizes.hop_rounds))
        counts = engine.take()
        p50.append(percentile_us(counts.hops_ns, 50) / 1000)
        p99.append(percentile_us(counts.hops_ns, 99) / 1000)
        cpu.append((manager.cpu_s - before_s) * 1e6 / counts.num_dispatches)
    row = {"p50_ms": spread(p50), "p99_ms": spread(p99), "cpu_us_per_call": spread(cpu)}
    return {"sessions": num_sessions, **row}


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


def _calls(sizes: Sizes) -> dict[str, Any]:
    """Processor time of the manager for a call's whole life, in submits of 64, one after the other."""
    costs = []
    with simulated_service() as (manager, _):
        asyncio.run(_batches(manager, sizes.num_batches))
        for _ in range(sizes.repeats):
            before_s = manager.cpu_s
            asyncio.run(_batches(manager, sizes.num_batches))
            costs.append((manager.cpu_s - before_s) * 1e6 / (sizes.num_batches * BATCH))
    calls = {"cpu_us": spread(costs), "calls": sizes.num_batches * BATCH}
    print(f"manager, processor time of a call in submits of {BATCH}: {show(spread(costs), 0)} us", flush=True)
    return calls


async def _batches(manager: ManagerProcess, num_batches: int) -> None:
    client = await HttpClient.connect(manager.port)
    for _ in range(num_batches):
        session_id = new_session_id()
        await client.post("/v1/submit", batch_body(session_id, BATCH, sampling=SHORT))
        await client.post("/v1/get", {"session_id": session_id, "semantic_var_id": f"v-{BATCH - 1}"})
        await client.request("DELETE", f"/v1/session/{session_id}")
    client.close()


def _memory(sizes: Sizes) -> dict[str, Any]:
    with simulated_service(step_s=10.0) as (manager, _):
        memory = asyncio.run(_session_bytes(manager, sizes))
    print(f"a live session of {SESSION_CALLS} calls x 2 KB: {memory['bytes'] / 1024:.1f} KB", flush=True)
    return memory


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


def _of_one_process(name: str) -> Callable[[Sizes], Any]:
    return lambda sizes: manager_parts.MEASURES[name](sizes.parts)


MEASURES: dict[str, Callable[[Sizes], Any]] = {
    **{name: _of_one_process(name) for name in manager_parts.MEASURES},
    "hops": _hops,
    "calls": _calls,
    "memory": _memory,
    "rate": lambda sizes: manager_rate.measure(sizes.rate),
}
PARTS = tuple(MEASURES)
