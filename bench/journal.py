"""What the journal costs, and what it brings back: a manager with it and one without, in turns.

Each client submits a batch of calls in a new session, gets the last value and deletes the session. ``paced``
leaves the manager mostly idle, ``full`` waits for nothing. Then a manager starts with the journal that
another has left behind.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parrot.config import DEFAULT_MODEL, ManagerConfig
from parrot.manager.clock import now_us
from parrot.manager.journal import Journal
from parrot.manager.session import SessionTable
from parrot.manager.slices import run_whole
from parrot.manager.submit_body import reading
from parrot.models import resolve_model
from parrot.tokenizer import Tokenizer

from .service_load import (
    HttpClient,
    ManagerProcess,
    batch_body,
    chain_body,
    manager_process,
    new_session_id,
    simulated_service,
)
from .timing import latencies, per, print_table, show, spread

BATCH = 8
ANSWER = "The summary of this part is short, and every reader of it can go on from here."
SESSION_CALLS = 8
_STEP_S = 0.002
_MAX_TOKENS = 2
_PACE_S = 0.05  # between a client's submits


@dataclass
class Round:
    """Of one mode in one round. ``gets`` are the times from a submit's answer to its last value."""

    submits: list[int] = field(default_factory=list)
    gets: list[int] = field(default_factory=list)
    calls_per_s: float = 0.0
    cpu_us: float = 0.0


def run(quick: bool) -> dict[str, Any]:
    """Measure both modes in turns, then recovery."""
    num_rounds, round_s = (3, 3.0) if quick else (7, 10.0)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        options = {"without": (), "journal": ("--journal", str(Path(directory) / "journal"))}
        managers = {
            mode: stack.enter_context(simulated_service(step_s=_STEP_S, options=extra))[0]
            for mode, extra in options.items()
        }
        rows: dict[str, Any] = {}
        for load, num_clients, pause_s in (("paced", 4, _PACE_S), ("full", 8, 0.0)):
            rounds: dict[str, list[Round]] = {mode: [] for mode in managers}
            for _ in range(num_rounds):
                for mode, manager in managers.items():
                    rounds[mode].append(asyncio.run(_round(manager, num_clients, pause_s, round_s)))
            rows |= {f"{load}, {mode}": _summary(rounds[mode]) for mode in managers}
    _print(rows)
    recovery = _recovery(500 if quick else 10_000)
    print(
        f"{recovery['sessions']:,} sessions of {SESSION_CALLS} calls, {recovery['bytes_per_call']:.0f} bytes "
        f"a call on disk: up after {recovery['recovery_s']:.1f} s, without them {recovery['start_s']:.1f} s"
    )
    return {"rows": rows, "recovery": recovery, "ok": recovery["values_right"]}


async def _round(manager: ManagerProcess, num_clients: int, pause_s: float, round_s: float) -> Round:
    measured, cpu_s, begun = Round(), manager.cpu_s, time.perf_counter()
    end = begun + round_s
    await asyncio.gather(*(_client(manager.port, pause_s, end, measured) for _ in range(num_clients)))
    num_calls = BATCH * len(measured.submits)
    measured.calls_per_s = num_calls / (time.perf_counter() - begun)
    measured.cpu_us = 1e6 * (manager.cpu_s - cpu_s) / num_calls
    return measured


async def _client(port: int, pause_s: float, end: float, measured: Round) -> None:
    client = await HttpClient.connect(port)
    while time.perf_counter() < end:
        session_id = new_session_id()
        body = json.dumps(_short(batch_body(session_id, BATCH))).encode()
        begun = time.perf_counter_ns()
        status, answer = await client.request("POST", "/v1/submit", body)
        taken = time.perf_counter_ns()
        if status != 200:
            raise RuntimeError(f"{status} {answer[:200]!r}")
        await client.post("/v1/get", {"session_id": session_id, "semantic_var_id": f"v-{BATCH - 1}"})
        measured.submits.append(taken - begun)
        measured.gets.append(time.perf_counter_ns() - taken)
        await client.request("DELETE", f"/v1/session/{session_id}")
        await asyncio.sleep(pause_s)
    client.close()


def _short(body: dict[str, Any]) -> dict[str, Any]:
    """With answers of a few tokens: the engine is not what is measured."""
    for call in body["calls"]:
        call["placeholders"][-1]["sampling"]["max_tokens"] = _MAX_TOKENS
    return body


def _summary(rounds: list[Round]) -> dict[str, Any]:
    return {
        "submit": latencies([one.submits for one in rounds]),
        "get": latencies([one.gets for one in rounds]),
        "calls_per_s": spread([one.calls_per_s for one in rounds]),
        "cpu_us_per_call": spread([one.cpu_us for one in rounds]),
    }


def _print(rows: dict[str, Any]) -> None:
    figures: dict[str, Callable[[dict[str, Any]], str]] = {
        "submit p50, ms": lambda row: show(per(1000, row["submit"]["p50_us"]), 1),
        "submit p99, ms": lambda row: show(per(1000, row["submit"]["p99_us"]), 1),
        "value p50, ms": lambda row: show(per(1000, row["get"]["p50_us"]), 1),
        "value p99, ms": lambda row: show(per(1000, row["get"]["p99_us"]), 1),
        "calls/s": lambda row: show(row["calls_per_s"], 0),
        "CPU, us/call": lambda row: show(row["cpu_us_per_call"], 0),
    }
    cells = [(name, *(cell(row) for row in rows.values())) for name, cell in figures.items()]
    print_table(f"Submits of {BATCH} calls (2 KB template, 200 B values)", ("", *rows), cells)


def _recovery(num_sessions: int) -> dict[str, Any]:
    """A manager's start with the journal of one that was killed, of whose calls a tenth had not ended."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        sessions = asyncio.run(_fill(path, num_sessions))
        num_bytes = path.stat().st_size
        with _timed_start() as (start_s, _):
            pass
        with _timed_start("--journal", str(path)) as (recovery_s, manager):
            values_right = asyncio.run(_check(manager.port, sessions))
            memory = manager.memory_bytes
    return {
        "sessions": num_sessions,
        "bytes_per_call": num_bytes / (num_sessions * SESSION_CALLS),
        "start_s": start_s,
        "recovery_s": recovery_s,
        "memory_mib": memory / 2**20,
        "values_right": values_right,
    }


@contextmanager
def _timed_start(*options: str) -> Iterator[tuple[float, ManagerProcess]]:
    begun = time.perf_counter()
    with manager_process(*options) as manager:
        yield time.perf_counter() - begun, manager


async def _fill(path: Path, num_sessions: int) -> list[str]:
    """What a manager would have written of sessions of a chain each; their ids. The last call of every tenth
    has not ended."""
    tokenizer = Tokenizer.load(resolve_model(DEFAULT_MODEL, weights=False))
    journal = Journal.open(path, about={"tokenizer": tokenizer.fingerprint})
    journal.start()
    table = SessionTable(ManagerConfig(), journal=journal)
    ids = []
    for number in range(num_sessions):
        session = table.create()
        ids.append(session.session_id)
        raw = json.dumps(chain_body(session.session_id, SESSION_CALLS)).encode()
        session.graph.add(run_whole(reading(raw, ManagerConfig())), now_us=now_us())
        for index in range(SESSION_CALLS - (number % 10 == 0)):
            call = session.graph.live[f"r-{index}"]
            call.dispatch("sim-0")
            session.graph.complete(call, 0, _text(session.session_id, index))
        if number % 64 == 0:
            await journal.committed(journal.last_ticket)
    await journal.committed(journal.last_ticket)
    journal.close()
    return ids


def _text(session_id: str, index: int) -> str:
    return f"{ANSWER} {session_id} {index}"


async def _check(port: int, session_ids: list[str]) -> bool:
    """Whether a value of each session is what it was."""
    http = await HttpClient.connect(port)
    is_right = True
    for session_id in session_ids:
        get = {"session_id": session_id, "semantic_var_id": "v-3", "timeout_ms": 0}
        is_right &= (await http.post("/v1/get", get))["value"] == _text(session_id, 3)
    http.close()
    return is_right
