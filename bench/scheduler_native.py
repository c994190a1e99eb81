"""Algorithm 1 in steady state without Python: rates and times, memory of the queue, quality of shortlists."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import fill
from typing import Any

from .native import build_driver, run_driver
from .timing import LINE, print_table

DRIVER = "scheduler_bench"
EVENTS = ("submit", "schedule", "finish")
# What the driver calls them: no prefixes; 100,000 of them; with task groups; also 50 tenants and aging.
MAIN = ("alone", "prefixes", "groups", "all")
# Tokens bound the engines and some are always left; eight prefixes that all engines have; two objectives.
OTHER = ("tight", "tight-prefixes", "hot", "mixed")
MAX_EVENT_US = 200
WEIGHED = 100_000  # calls of which memory is judged: of fewer, tables that have just doubled weigh too much
LEGEND = (
    "calls: alone = no prefixes; prefixes = 100,000 of them; groups = these and task groups; all = these, "
    "50 tenants and aging; tight = tokens bound the engines and some are always free, too few for a call; "
    "tight-prefixes = that, 200 prefixes, 50 tenants; hot = 8 prefixes that all engines have; mixed = every "
    "eighth call latency-bound"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Engines and queued calls of every combination; 0 queued calls mean engines that are half full."""

    engines: tuple[int, ...] = (1, 16, 100, 1_000)
    queued: tuple[int, ...] = (0, 1_000, 10_000, 100_000)
    other_fleets: tuple[tuple[int, int], ...] = ((100, 10_000), (100, 100_000), (1_000, 0))
    shortlists: tuple[int, ...] = (100, 1_000)
    num_placements: int = 20_000
    num_weighed: int = WEIGHED
    repeats: int = 5


FULL = Sizes()
QUICK = Sizes((16, 1_000), (0, 1_000), ((100, 10_000),), (1_000,), 4_000, 10_000, 3)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Rates and times of every fleet, bytes per queued call, and how far shortlists are from full scans."""
    driver = build_driver(DRIVER)
    fleets = [(engines, queued) for engines in sizes.engines for queued in sizes.queued]
    cases = [(calls, *fleet) for fleet in fleets for calls in MAIN]
    cases += [(calls, *fleet) for fleet in sizes.other_fleets for calls in OTHER]
    rows = []
    for calls, engines, queued in cases:
        print(f"in C++: {engines:,} engines, {queued:,} calls queued, {calls}", flush=True)
        rows.append(run_driver(driver, calls, engines, queued, sizes.num_placements, sizes.repeats))
    memory = [run_driver(driver, "memory", calls, sizes.num_weighed) for calls in (*MAIN, "hot")]
    shortlists = [run_driver(driver, "shortlist", count, sizes.num_placements) for count in sizes.shortlists]
    _print(rows, memory, shortlists)
    return {
        "rows": rows,
        "bytes_per_queued_call": {row["calls"]: row["bytes_per_queued_call"] for row in memory},
        "shortlists": shortlists,
        "targets": targets(rows, memory if sizes.num_weighed >= WEIGHED else [], shortlists),
    }


def _print(
    rows: list[dict[str, Any]], memory: list[dict[str, Any]], shortlists: list[dict[str, Any]]
) -> None:
    print_table(
        "without Python; medians: thousand placements a second, and a second of the CPU; "
        "us of an event, with the clock (0.03): p50, p99",
        ("engines", "queued", "calls", "k/s", "k/CPU s", *EVENTS),
        [
            (
                f"{row['engines']:,}",
                f"{row['queued']:,}",
                row["calls"],
                f"{row['placements_per_s']['median'] / 1000:,.0f}",
                f"{row['placements_per_cpu_s']['median'] / 1000:,.0f}",
                *(_times(row[f"{event}_us"]) for event in EVENTS),
            )
            for row in rows
        ],
    )
    print(fill(LEGEND, LINE))
    print_table(
        "bytes per queued call of 200 tokens, its share of the prefix table included",
        ("calls", "bytes"),
        [(row["calls"], f"{row['bytes_per_queued_call']:,.0f}") for row in memory],
    )
    print_table(
        "score of the chosen engine above the best of a full scan, engines all different",
        ("engines", "p50", "p99", "max"),
        [
            (f"{row['engines']:,}", *(f"{row['excess'][part]:.2%}" for part in ("p50", "p99", "max")))
            for row in shortlists
        ],
    )


def _times(figures: dict[str, float]) -> str:
    return f"{figures['p50']:.1f}, {figures['p99']:.1f}"


def targets(
    rows: list[dict[str, Any]], memory: list[dict[str, Any]], shortlists: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Each target that these sizes measure, with the worst figure and whether it is met; prints them."""

    def least_rate(calls: str, engines: int) -> list[float]:
        return [
            row["placements_per_s"]["median"]
            for row in rows
            if (row["calls"], row["engines"]) == (calls, engines) and row["queued"] >= 1_000
        ]

    longest = [row[f"{event}_us"]["p99"] for row in rows if row["queued"] >= 90_000 for event in EVENTS]
    figures = {
        "placements/s, 1,000 engines, all: >= 100,000": (least_rate("all", 1_000), 1e5, False),
        "placements/s, 100 engines, alone: >= 1,000,000": (least_rate("alone", 100), 1e6, False),
        f"p99 of an event at 100,000 queued, us: < {MAX_EVENT_US}": (longest, MAX_EVENT_US, True),
        "bytes per queued call: <= 1,024": ([row["bytes_per_queued_call"] for row in memory], 1_024, True),
        "excess of a shortlisted choice: <= 5 %": ([row["excess"]["max"] for row in shortlists], 0.05, True),
    }
    found = {}
    for name, (values, bound, is_upper) in figures.items():
        if values:
            worst = max(values) if is_upper else min(values)
            found[name] = {"worst": worst, "met": worst <= bound if is_upper else worst >= bound}
    print_table(
        "targets",
        ("target", "worst", "met"),
        [
            (name, f"{target['worst']:,.4g}", "yes" if target["met"] else "no")
            for name, target in found.items()
        ],
    )
    if len(found) < len(figures):
        left = "; ".join(name for name in figures if name not in found)
        print(fill(f"not judged at these sizes: {left}", LINE))
    return found
