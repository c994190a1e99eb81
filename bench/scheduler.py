"""Algorithm 1 in steady state: calls finish, others come, the scheduler places; in C++ and from Python.

The first part is :mod:`bench.scheduler_native`; the rest goes through the Python binding.

A round is what one engine step brings about: eight calls finish, eight are submitted, one ``schedule`` places
eight. Every engine is full and the queue keeps its length. Every figure includes the Python calls. Engines
are full by their batch, except in the tight rows: there a few tokens of each stay free, too few for a call.
Exit code 1: a target of the C++ part was missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from . import scheduler_native
from .scheduler_load import BATCH, GROUP, PROMPT, TIGHT, WORKLOADS, Driver, Workload
from .timing import (
    Spread,
    latencies,
    print_table,
    resident_growth,
    show,
    spread,
    time_calls,
)

ROUND = GROUP  # so that a round can place a whole task group
EVENTS = ("submit", "finish", "schedule")
ROUND_US = 500  # of the scheduler's clock


@dataclass(frozen=True, slots=True)
class Sizes:
    """Fleets are pairs of engines and queued calls; ``tight_fleets`` those of the tight workload;
    ``native`` what the C++ driver measures."""

    fleets: tuple[tuple[int, int], ...]
    tight_fleets: tuple[tuple[int, int], ...]
    native: scheduler_native.Sizes
    num_rounds: int = 100
    num_tight_rounds: int = 100
    num_weighed: int = 20_000
    repeats: int = 5


_SMALL = ((16, 1_000), (100, 1_000))
_LARGE = tuple((engines, queued) for engines in (1, 16, 100, 1_000) for queued in (1_000, 10_000))
QUICK = Sizes(_SMALL, _SMALL, scheduler_native.QUICK, num_rounds=20, num_tight_rounds=20, num_weighed=5_000)
FULL = Sizes(_LARGE, _LARGE, scheduler_native.FULL)


def run(quick: bool) -> dict[str, Any]:
    """Measure all fleets and print them."""
    return measure(QUICK if quick else FULL)


def measure(sizes: Sizes) -> dict[str, Any]:
    """All fleets of ``sizes`` under every workload; a fleet that is not filled, or not kept full, raises."""
    native = scheduler_native.measure(sizes.native)
    memory = _bytes_per_call(sizes)
    print("through Python", flush=True)
    rows = [
        _steady(sizes, workload, *fleet, sizes.num_rounds) for fleet in sizes.fleets for workload in WORKLOADS
    ]
    rows += [_steady(sizes, TIGHT, *fleet, sizes.num_tight_rounds) for fleet in sizes.tight_fleets]
    print_table(
        f"Python calls included; medians of {sizes.repeats}: thousand placements a second; us of an event, "
        f"p50, p99; a schedule places {ROUND}",
        ("engines", "queued", "calls", "k/s", *EVENTS),
        [
            (
                f"{row['engines']:,}",
                f"{row['queued']:,}",
                row["calls"],
                f"{row['placements_per_s']['median'] / 1000:,.0f}",
                *(_latency(row[event]) for event in EVENTS),
            )
            for row in rows
        ],
    )
    print_table(
        f"bytes per queued call of {PROMPT} tokens, its share of the prefix table included",
        ("calls", "bytes"),
        [(name, show(figure, 0)) for name, figure in memory.items()],
    )
    met = all(target["met"] for target in native["targets"].values())
    return {"native": native, "rows": rows, "bytes_per_queued_call": memory, "ok": met}


def _latency(figures: dict[str, Spread]) -> str:
    return ", ".join(f"{figure['median']:.1f}" for figure in figures.values())


def _steady(sizes: Sizes, workload: Workload, engines: int, queued: int, num_rounds: int) -> dict[str, Any]:
    """Rounds on a full fleet with a queue of constant length."""
    num_first, num_later = queued + BATCH * engines, ROUND * num_rounds * sizes.repeats
    driver = Driver(workload, engines, num_first + num_later)
    for _ in range(num_first):
        driver.submit()
    driver.schedule()
    if driver.num_placed != BATCH * engines:
        raise RuntimeError(f"{engines} empty engines took {driver.num_placed} calls")
    rates: list[float] = []
    times: dict[str, list[list[int]]] = {event: [] for event in EVENTS}
    for _ in range(sizes.repeats):
        for event in EVENTS:
            times[event].append([])
        latest = {event: repeats[-1] for event, repeats in times.items()}
        start = perf_counter_ns()
        for _ in range(num_rounds):
            _round(driver, latest)
        rates.append(ROUND * num_rounds * 1e9 / (perf_counter_ns() - start))
    driver.scheduler.check_invariants()
    if driver.num_placed != BATCH * engines + num_later or driver.scheduler.num_queued != queued:
        raise RuntimeError(f"{driver.num_placed} calls were placed, {driver.scheduler.num_queued} are queued")
    reasons = {name: count for name, count in driver.scheduler.counters().items() if count}
    return {
        "engines": engines,
        "queued": queued,
        "calls": workload.name,
        "placements_per_s": spread(rates),
        **{event: latencies(repeats) for event, repeats in times.items()},
        "counters": reasons,
    }


def _round(driver: Driver, times: dict[str, list[int]]) -> None:
    driver.now_us += ROUND_US
    once = [()]
    times["finish"] += time_calls(driver.finish, once * ROUND)
    times["submit"] += time_calls(driver.submit, once * ROUND)
    times["schedule"] += time_calls(driver.schedule, once)


def _bytes_per_call(sizes: Sizes) -> dict[str, Spread]:
    """Without groups, of which a queued call has only one more entry in a map."""
    kinds = WORKLOADS[:2]
    waiting = iter([Driver(kind, 0, sizes.num_weighed) for _ in range(sizes.repeats) for kind in kinds])

    def fill() -> Driver:
        driver = next(waiting)
        for _ in range(sizes.num_weighed):
            driver.submit()
        return driver

    per_call = [grown / sizes.num_weighed for grown in resident_growth(fill, sizes.repeats * len(kinds))]
    return {kind.name: spread(per_call[i :: len(kinds)]) for i, kind in enumerate(kinds)}
