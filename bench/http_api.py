"""The HTTP API under load: submits at a fixed rate, the OpenAI routes, and /health beside the largest body.

Manager, simulated engine and client share the machine's cores. Latencies are the client's, from the time at
which a request was due, so that a late one counts as late.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parrot.config import DEFAULT_MODEL, ManagerConfig

from .manager import BATCH
from .service_load import (
    HttpClient,
    ManagerProcess,
    batch_body,
    call_body,
    filler,
    new_session_id,
    simulated_service,
)
from .timing import percentile_us, print_table, show, spread

CALLS_PER_S = 2000
_NUM_CLIENTS = 16
_MARK = b"s-" + b"0" * 32
HOLES = "{{input:value}}{{input:before}}{{output:out}}"
_LIMITS = ManagerConfig()
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """``submit_s`` at each rate; ``num_requests`` to each OpenAI route, ``at_once`` of them open."""

    rates: tuple[int, ...]
    submit_s: float
    repeats: int
    num_requests: int
    at_once: int


QUICK = Sizes((500, CALLS_PER_S), 3.0, 1, 200, 16)
FULL = Sizes((500, 1000, CALLS_PER_S), 6.0, 3, 2000, 64)


def run(quick: bool, *, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print everything, or the parts that are named; each is printed when it is done."""
    sizes = QUICK if quick else FULL
    return {name: part(sizes) for name, part in _MEASURES.items() if only is None or name in only}


def _submit_rows(sizes: Sizes) -> list[Row]:
    with simulated_service() as (manager, _):
        asyncio.run(_submits(manager, 250, 1.0))
        rows = [_submit_row(manager, rate, sizes) for rate in sizes.rates]
    print_table(
        f"submits of {BATCH} calls (2 KB template, 200 B value), ms; {sizes.repeats} runs",
        ("calls/s", "p50", "p99", "manager us per call"),
        [
            (
                f"{row['calls_per_s']:,}",
                show(row["p50_ms"]),
                show(row["p99_ms"]),
                show(row["cpu_us_per_call"], 0),
            )
            for row in rows
        ],
    )
    return rows


def _route_rows(sizes: Sizes) -> list[Row]:
    with simulated_service(step_s=0.002) as (manager, _):
        rows = [_route_row(manager, route, body, sizes) for route, body in _openai_bodies().items()]
    print_table(
        f"OpenAI routes, {sizes.at_once} requests at once, 4 tokens of 2 ms",
        ("route", "requests/s", "p50 ms", "manager us"),
        [(row["route"], show(row["per_s"], 0), show(row["p50_ms"]), show(row["cpu_us"], 0)) for row in rows],
    )
    return rows


def _health_rows(sizes: Sizes) -> list[Row]:
    with simulated_service(step_s=5.0) as (manager, _):
        rows = [asyncio.run(_health(manager)) for _ in range(sizes.repeats)]
    worst, took = max(row["most_ms"] for row in rows), max(row["submit_s"] for row in rows)
    print(
        f"/health while {rows[0]['mib']:.1f} MiB with {_LIMITS.max_calls_per_submit:,} calls come and "
        f"go ({took:.2f} s at most): p50 {rows[0]['p50_ms']:.1f} ms, at most {worst:.1f} ms",
        flush=True,
    )
    return rows


def _submit_row(manager: ManagerProcess, rate: int, sizes: Sizes) -> dict[str, Any]:
    p50, p99, cpu = [], [], []
    for _ in range(sizes.repeats):
        before_s = manager.cpu_s
        times = asyncio.run(_submits(manager, rate, sizes.submit_s))
        p50.append(percentile_us(times, 50) / 1000)
        p99.append(percentile_us(times, 99) / 1000)
        cpu.append((manager.cpu_s - before_s) * 1e6 / (BATCH * len(times)))
    row = {"p50_ms": spread(p50), "p99_ms": spread(p99), "cpu_us_per_call": spread(cpu)}
    return {"calls_per_s": rate, **row}


async def _submits(manager: ManagerProcess, calls_per_s: int, for_s: float) -> list[int]:
    """Sessions of 64 calls, one submit each, deleted when the last call has its value; nanoseconds of each
    submit."""
    free: asyncio.Queue[HttpClient] = asyncio.Queue()
    for _ in range(_NUM_CLIENTS):
        free.put_nowait(await HttpClient.connect(manager.port))
    template = json.dumps(batch_body(_MARK.decode(), BATCH)).encode()
    times: list[int] = []

    async def request(method: str, path: str, body: bytes = b"") -> None:
        client = await free.get()
        status, answer = await client.request(method, path, body)
        free.put_nowait(client)
        if status >= 300:
            raise RuntimeError(f"{path}: {status} {answer[:300]!r}")

    async def session(due: float) -> None:
        session_id = new_session_id()
        await request("POST", "/v1/submit", template.replace(_MARK, session_id.encode()))
        times.append(round((time.perf_counter() - due) * 1e9))
        await asyncio.sleep(1.0)
        await request("DELETE", f"/v1/session/{session_id}")

    began = time.perf_counter()
    tasks = []
    for index in range(round(for_s * calls_per_s / BATCH)):
        due = began + index * BATCH / calls_per_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(session(due)))
    await asyncio.gather(*tasks)
    while not free.empty():
        free.get_nowait().close()
    return times


def _openai_bodies() -> dict[str, bytes]:
    """By what the table calls them."""
    chat = [{"role": "system", "content": filler(2048)}, {"role": "user", "content": filler(200)}]
    common = {"model": DEFAULT_MODEL, "max_tokens": 4, "ignore_eos": True}
    bodies = {
        "/v1/completions": {**common, "prompt": filler(2048)},
        "/v1/chat/completions": {**common, "messages": chat},
    }
    return {route: json.dumps(body).encode() for route, body in bodies.items()}


def _route_row(manager: ManagerProcess, route: str, body: bytes, sizes: Sizes) -> dict[str, Any]:
    rates, p50, cpu = [], [], []
    for _ in range(sizes.repeats):
        before_s, began = manager.cpu_s, time.perf_counter()
        times = asyncio.run(_requests(manager, route, body, sizes))
        took_s = time.perf_counter() - began
        rates.append(len(times) / took_s)
        p50.append(percentile_us(times, 50) / 1000)
        cpu.append((manager.cpu_s - before_s) * 1e6 / len(times))
    row = {"per_s": spread(rates), "p50_ms": spread(p50), "cpu_us": spread(cpu)}
    return {"route": route, **row}


async def _requests(manager: ManagerProcess, route: str, body: bytes, sizes: Sizes) -> list[int]:
    times: list[int] = []

    async def client(num_requests: int) -> None:
        connection = await HttpClient.connect(manager.port)
        for _ in range(num_requests):
            began = time.perf_counter_ns()
            status, answer = await connection.request("POST", route, body)
            if status != 200:
                raise RuntimeError(f"{route}: {status} {answer[:300]!r}")
            times.append(time.perf_counter_ns() - began)
        connection.close()

    await asyncio.gather(*[client(sizes.num_requests // sizes.at_once) for _ in range(sizes.at_once)])
    return times


def largest_body(session_id: str) -> bytes:
    """As many calls as a submit may have, as long as a body may be."""
    num_calls, max_bytes = _LIMITS.max_calls_per_submit, _LIMITS.max_body_bytes
    empty = json.dumps(call_body(num_calls, None, template=""))
    num_chars = max_bytes // num_calls - len(empty) - 100
    calls = [call_body(index, None, template=filler(num_chars, index) + HOLES) for index in range(num_calls)]
    return json.dumps({"session_id": session_id, "create_session": True, "calls": calls}).encode()


async def _health(manager: ManagerProcess) -> dict[str, Any]:
    """Milliseconds of /health, asked every 5 ms while the largest body is submitted and for a second more."""
    session_id = new_session_id()
    body = largest_body(session_id)
    submitter, prober = [await HttpClient.connect(manager.port) for _ in range(2)]
    times: list[float] = []
    done = asyncio.Event()

    async def probe() -> None:
        while not done.is_set():
            began = time.perf_counter()
            await prober.request("GET", "/health")
            times.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(0.005)

    probing = asyncio.create_task(probe())
    began = time.perf_counter()
    status, answer = await submitter.request("POST", "/v1/submit", body)
    took_s = time.perf_counter() - began
    if status != 200:
        raise RuntimeError(f"the largest body: {status} {answer[:300]!r}")
    await asyncio.sleep(1.0)
    await submitter.request("DELETE", f"/v1/session/{session_id}")
    done.set()
    await probing
    submitter.close()
    prober.close()
    times.sort()
    return {
        "mib": len(body) / 2**20,
        "submit_s": took_s,
        "probes": len(times),
        "p50_ms": times[len(times) // 2],
        "most_ms": times[-1],
    }


_MEASURES: dict[str, Callable[[Sizes], list[Row]]] = {
    "submits": _submit_rows,
    "routes": _route_rows,
    "health": _health_rows,
}
PARTS = tuple(_MEASURES)
