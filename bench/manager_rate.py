"""Latency against rate: chains of calls of a second arrive at random, at rates that rise without a pause.

Each rate is held until the chains of the one before have ended, and then measured. A rate is kept if as many
calls are dispatched as are due; how late the client itself was says whether it was the limit.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .service_load import (
    CALL_TOKENS,
    SHORT,
    HttpClient,
    ManagerProcess,
    chain_body,
    new_session_id,
    simulated_service,
)
from .timed_engine import TimedEngine, take_all
from .timing import percentile_us, print_table

MEDIAN_INFERENCE_S = 1.0
CHAIN = 4
_SETTLE_S = (CHAIN + 0.5) * MEDIAN_INFERENCE_S
_KEPT = 0.8  # of the calls that are due, for a rate to count as kept; chance alone takes a tenth
_MARK = "s-" + "0" * 32
_HEAD = ("calls/s", "achieved", "p50 ms", "p99 ms", "manager cores", "client late p99 ms")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """``rates`` are calls per second, each measured for ``window_s``."""

    rates: tuple[int, ...]
    window_s: float
    num_engines: int


QUICK = Sizes((200, 500), 2.0, 1)
FULL = Sizes((250, 500, 1000, 1500, 2000, 2500, 3000), 4.0, 4)


def measure(sizes: Sizes) -> list[Row]:
    """Rates up to the first that is not kept; each is printed when it has been measured."""
    # Otherwise what latency-bound calls allow on one engine is reached long before the manager's limits.
    options = ("--off", "objective_aware")
    step_s = MEDIAN_INFERENCE_S / CALL_TOKENS
    with simulated_service(sizes.num_engines, step_s=step_s, options=options) as (manager, engines):
        rows = asyncio.run(_rising(manager, engines, sizes))
    print_table(
        f"calls of 1 s, in chains of {CHAIN} that arrive at random; engines: {sizes.num_engines}",
        _HEAD,
        [tuple(_cells(row)) for row in rows],
    )
    _print_limits(rows)
    return rows


def _cells(row: Row) -> list[str]:
    whole = [f"{row[key]:,}" for key in ("rate", "achieved")]
    return whole + [f"{row[key]:.2f}" for key in ("p50_ms", "p99_ms", "cpu", "client_late_ms")]


def _print_limits(rows: Sequence[Row]) -> None:
    limit_ms = MEDIAN_INFERENCE_S * 10
    kept = [row for row in rows if row["kept"]]
    for name in ("p50_ms", "p99_ms"):
        over = next((row["rate"] for row in rows if row[name] > limit_ms), None)
        reached = f"at {over:,} calls/s" if over is not None else f"above {rows[-1]['rate']:,} calls/s"
        print(f"{name[:3]} of the hop passes 1 % of a median inference ({limit_ms:.0f} ms) {reached}")
    print(f"kept: up to {max((row['rate'] for row in kept), default=0):,} calls/s", flush=True)


class _Load:
    """Chains that arrive at random, each a session of its own."""

    def __init__(self, port: int) -> None:
        self.rate = 0
        self.late_ns: list[int] = []
        self._port = port
        self._rng = random.Random(1)
        self._free: list[HttpClient] = []
        self._chains: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._body = json.dumps(chain_body(_MARK, CHAIN, sampling=SHORT))

    async def run(self) -> None:
        """Until it is cancelled; ``rate`` may change at any time."""
        due = time.perf_counter()
        try:
            while True:
                due += self._rng.expovariate(self.rate / CHAIN)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                self.late_ns.append(round((time.perf_counter() - due) * 1e9))
                if self._failure is not None:
                    raise self._failure
                chain = asyncio.create_task(self._chain())
                self._chains.add(chain)
                chain.add_done_callback(self._ended)
        finally:
            for chain in self._chains:
                chain.cancel()
            await asyncio.gather(*self._chains, return_exceptions=True)
            for client in self._free:
                client.close()

    def _ended(self, chain: asyncio.Task[None]) -> None:
        self._chains.discard(chain)
        if not chain.cancelled():
            self._failure = self._failure or chain.exception()

    async def _chain(self) -> None:
        client = self._free.pop() if self._free else await HttpClient.connect(self._port)
        session_id = new_session_id()
        body = self._body.replace(_MARK, session_id).encode()
        status, answer = await client.request("POST", "/v1/submit", body)
        if status != 200:
            raise RuntimeError(f"submit: {status} {answer[:300]!r}")
        await client.post("/v1/get", {"session_id": session_id, "semantic_var_id": f"v-{CHAIN - 1}"})
        await client.request("DELETE", f"/v1/session/{session_id}")
        self._free.append(client)


async def _rising(manager: ManagerProcess, engines: Sequence[TimedEngine], sizes: Sizes) -> list[Row]:
    load = _Load(manager.port)
    load.rate = sizes.rates[0]
    arriving = asyncio.create_task(load.run())
    rows: list[Row] = []
    for rate in sizes.rates:
        load.rate = rate
        await _while_running(arriving, _SETTLE_S)
        rows.append(await _window(manager, engines, load, arriving, sizes.window_s))
        print(
            "  ".join(f"{name} {cell}" for name, cell in zip(_HEAD, _cells(rows[-1]), strict=True)),
            flush=True,
        )
        if not rows[-1]["kept"]:
            break
    arriving.cancel()
    await asyncio.gather(arriving, return_exceptions=True)
    return rows


async def _while_running(arriving: asyncio.Task[None], for_s: float) -> None:
    await asyncio.wait([arriving], timeout=for_s)
    if arriving.done():
        arriving.result()


async def _window(
    manager: ManagerProcess,
    engines: Sequence[TimedEngine],
    load: _Load,
    arriving: asyncio.Task[None],
    for_s: float,
) -> Row:
    await asyncio.to_thread(take_all, engines)
    load.late_ns.clear()
    began, before_s = time.perf_counter(), manager.cpu_s
    await _while_running(arriving, for_s)
    counts = await asyncio.to_thread(take_all, engines)
    took_s = time.perf_counter() - began
    achieved = counts.num_dispatches / took_s
    hops = counts.hops_ns or [0]
    return {
        "rate": load.rate,
        "achieved": round(achieved),
        "hops": len(counts.hops_ns),
        "kept": achieved >= _KEPT * load.rate,
        "p50_ms": percentile_us(hops, 50) / 1000,
        "p99_ms": percentile_us(hops, 99) / 1000,
        "cpu": (manager.cpu_s - before_s) / took_s,
        "client_late_ms": percentile_us(load.late_ns or [0], 99) / 1000,
    }
