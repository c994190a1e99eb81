"""One run: a service is started, programs are run alone, then by many clients while faults come, and then it
must come to rest with every promise kept."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from .clients import Clients, solo_values
from .faults import Faults
from .processes import Fleet
from .programs import make_programs

OPTIONS = ("minutes", "seed")  # of the command line
_NUM_ENGINES = 3
_NUM_CLIENTS = 24
_END_S = 180.0  # after the last fault, for every get to end
_REST_S = 120.0  # then, for sessions of clients who vanished to expire


@dataclass(frozen=True)
class Report:
    """What happened; ``problems`` are broken promises."""

    seed: int
    faults: dict[str, int]
    outcomes: dict[str, int]
    counters: dict[str, int]
    problems: list[str]

    def table(self) -> str:
        """For a terminal."""
        parts = (("fault", self.faults), ("sessions", self.outcomes), ("counter", self.counters))
        lines = [f"seed {self.seed}"]
        for title, numbers in parts:
            lines += [f"  {title:<9} {name:<44} {number:>9g}" for name, number in sorted(numbers.items())]
        lines += [f"  BROKEN    {problem}" for problem in self.problems]
        return "\n".join(lines)


def run(quick: bool, minutes: float | None = None, seed: int | None = None) -> dict[str, Any]:
    """The benchmark: faults for so long (20 minutes; 1 with ``quick``)."""
    minutes = minutes if minutes is not None else 1.0 if quick else 20.0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        report = run_chaos(Path(directory), seconds=60 * minutes, seed=seed)
    print(report.table(), flush=True)
    rows = {"faults": report.faults, "sessions": report.outcomes, "counters": report.counters}
    return {
        "ok": not report.problems,
        "minutes": minutes,
        "seed": report.seed,
        "took_s": round(time.monotonic() - started, 1),
        "problems": report.problems,
        **rows,
    }


def run_chaos(
    directory: Path, *, seconds: float, seed: int | None = None, model: Path | None = None
) -> Report:
    """Faults for so many seconds. The seed is printed: the same one draws the same faults and programs,
    though never at the same moments."""
    seed = secrets.randbelow(10**6) if seed is None else seed
    print(f"chaos: seed {seed}, {seconds:g} s of faults, logs in {directory}", flush=True)
    if model is None:
        model = import_module("tests.tiny_models").write_tiny_model(directory / "tiny")
    return asyncio.run(_run(directory, model, seconds, seed))


async def _run(directory: Path, model: Path, seconds: float, seed: int) -> Report:
    programs = make_programs(seed)
    fleet = Fleet(directory, model, num_engines=_NUM_ENGINES, seed=seed)
    problems: list[str] = []
    faults = Faults(fleet, seed)
    try:
        await fleet.start()
        expected = await solo_values(fleet.url, programs)
        clients = Clients(fleet.url, fleet.model, expected, seed)
        stop = asyncio.Event()
        working = asyncio.create_task(clients.work(programs, _NUM_CLIENTS, stop))
        await faults.inject(seconds)
        await faults.heal()
        stop.set()
        clients.finish_within(_END_S)
        await working
        problems += await _at_rest(fleet)
        await fleet.count()
    finally:
        codes = await fleet.close()
    if any(codes):
        problems.append(f"exit codes at SIGTERM: {codes}")
    outcomes = clients.outcomes
    if outcomes.broken:
        problems += [f"{outcomes.broken} sessions did not get what was promised", *outcomes.details]
    if outcomes.counts["right"] == 0:
        problems.append("no session got its value")
    if problems:
        sys.stderr.write(_tail(directory / "service.log"))
    return Report(seed, dict(faults.counts), dict(outcomes.counts), dict(fleet.counters), problems)


async def _at_rest(fleet: Fleet) -> list[str]:
    """What is left after everything has ended: nothing should be."""
    last: dict[str, Any] = {}

    def is_at_rest(state: dict[str, Any]) -> bool:
        last.update(state)
        return not _leftovers(state)

    if await fleet.wait_until(is_at_rest, _REST_S):
        return []
    return [f"not at rest after {_REST_S:g} s: {left}" for left in _leftovers(last)]


def _leftovers(state: dict[str, Any]) -> list[str]:
    metrics, left = state["metrics"], []
    for name in ('calls{state="unfinished"}', 'calls{state="busy"}', "sessions"):
        if metrics[f"parrot_{name}"]:
            left.append(f"{name} is {metrics[f'parrot_{name}']:g}")
    if len(state["engines"]) < _NUM_ENGINES:
        left.append(f"only {len(state['engines'])} engines are there")
    for engine in state["engines"]:
        stats = engine["stats"]
        busy = {name: stats[f"num_{name}"] for name in ("running", "waiting", "held_blocks")}
        if any(busy.values()) or engine["num_dispatched"]:
            left.append(f"{engine['name']} has {busy}, {engine['num_dispatched']} dispatched")
        if stats["pool_breaches"]:
            left.append(f"{engine['name']} lost its KV cache {stats['pool_breaches']} times")
    return left


def _tail(log: Path, num_bytes: int = 20_000) -> str:
    return log.read_bytes()[-num_bytes:].decode("utf-8", "replace")
