"""The prefix index: insert, match and remove at up to ten million entries, by a driver without Python.

The same calls are looked up in a radix tree over their tokens and by comparison with every one of them; the
answers, the longest known prefix and who has it, must be the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .native import build_driver, run_driver
from .timing import Spread, of_repeats, per, print_table, show, spread

DRIVER = "prefix_index_bench"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Entries of each part, look-ups per run, and runs, each in a process of its own."""

    entries: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
    calls: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    waiting: tuple[int, ...] = (1, 10, 100, 1_000)
    num_events: int = 100_000
    repeats: int = 5


FULL = Sizes()
QUICK = Sizes((1_000, 100_000), (1_000, 20_000), (1, 100), num_events=10_000, repeats=3)


def run(quick: bool) -> dict[str, Any]:
    """Measure all sizes and print them; ``ok`` says whether every answer was right."""
    return measure(QUICK if quick else FULL)


def measure(sizes: Sizes) -> dict[str, Any]:
    """All parts at ``sizes``."""
    driver = build_driver(DRIVER)
    lookups = {count: _runs(driver, "lookups", count, sizes.num_events, sizes) for count in sizes.entries}
    _print_lookups(lookups, sizes)
    calls = {count: _runs(driver, "calls", count, sizes.num_events, sizes) for count in sizes.calls}
    _print_calls(calls)
    num_long = max(1, sizes.num_events // 500)
    long = {count: _runs(driver, "long", count, num_long, sizes) for count in sizes.entries}
    _print_long(long)
    num_sets = max(1, sizes.num_events // 5_000)
    variables = {count: _runs(driver, "variables", count, num_sets, sizes) for count in sizes.waiting}
    _print_variables(variables)
    parts = {"lookups": lookups, "calls": calls, "long": long, "variables": variables}
    ok = all(row["ok"] for part in parts.values() for row in part.values())
    return {name: {str(count): row for count, row in part.items()} for name, part in parts.items()} | {
        "ok": ok
    }


def _runs(driver: Path, part: str, count: int, num_events: int, sizes: Sizes) -> dict[str, Any]:
    """The spread of every figure over the runs; ``ok`` is true when all of their checks are."""
    return combine([run_driver(driver, part, count, num_events) for _ in range(sizes.repeats)])


def combine(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures to spreads, groups of them likewise, checks to one ``ok``."""
    combined: dict[str, Any] = {}
    ok = True
    for name, value in runs[0].items():
        values = [run[name] for run in runs]
        if isinstance(value, bool):
            ok = ok and all(values)
        elif isinstance(value, dict):
            combined[name] = {key: spread([each[key] for each in values]) for key in value}
        else:
            combined[name] = spread(values)
    return combined | {"ok": ok}


def _latency(figures: dict[str, Spread]) -> tuple[str, str, str]:
    """Median, p99 and longest of one event, each the median of the runs."""
    p50, p99, longest = (figures[name]["median"] for name in ("p50_us", "p99_us", "max_us"))
    return f"{p50:,.2f}", f"{p99:,.2f}", f"{longest:,.0f}"


def _print_lookups(rows: dict[int, dict[str, Any]], sizes: Sizes) -> None:
    print_table(
        f"one key of 32 tokens per entry; us: p50, p99, max; {of_repeats(sizes.repeats)}",
        ("entries", "M matches/s", "match", "p99", "max", "insert", "p99", "max", "B/entry"),
        [
            (
                f"{count:,}",
                show(per(1e6, row["matches_per_s"])),
                *_latency(row["match"]),
                *_latency(row["insert"]),
                f"{row['resident_per_entry']['median']:,.0f}",
            )
            for count, row in rows.items()
        ],
    )


def _print_calls(rows: dict[int, dict[str, Any]]) -> None:
    print_table(
        "live calls of 200 tokens: longest known prefix and its newest owner; us: p50, p99, max",
        ("calls", "index", "p99", "max", "radix tree", "p99", "max", "comparing", "B/call", "tree B"),
        [
            (
                f"{count:,}",
                *_latency(row["index"]),
                *_latency(row["tree"]),
                _latency(row["comparison"])[0],
                f"{row['index_bytes']['median']:,.0f}",
                f"{row['tree_bytes']['median']:,.0f}",
            )
            for count, row in rows.items()
        ],
    )


def _print_long(rows: dict[int, dict[str, Any]]) -> None:
    print_table(
        "a prompt of 6,000 tokens with a boundary every 16, all 375 known, among so many other entries; "
        "us: p50, p99, max",
        ("others", "match", "p99", "max", "insert", "p99", "max", "radix tree"),
        [
            (f"{count:,}", *_latency(row["match"]), *_latency(row["insert"]), _latency(row["tree_match"])[0])
            for count, row in rows.items()
        ],
    )


def _print_variables(rows: dict[int, dict[str, Any]]) -> None:
    print_table(
        "a variable behind 1,000 tokens gets a text of 100; us: p50, p99, max",
        ("waiting calls", "set us", "p99", "max"),
        [(f"{count:,}", *_latency(row["set"])) for count, row in rows.items()],
    )
