"""What the benchmarks of the native core have in common: spreads, percentiles, resident memory, tables."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter_ns

from rich import box
from rich.console import Console
from rich.table import Table

Spread = dict[str, float]


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most of one figure over its repeats, to four digits."""
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def show(figure: Spread, digits: int = 2) -> str:
    """A spread as a cell of a table."""
    median, least, most = (f"{figure[name]:,.{digits}f}" for name in ("median", "least", "most"))
    return f"{median} ({least} to {most})"


def time_calls(verb: Callable[..., object], arguments: Iterable[tuple[object, ...]]) -> list[int]:
    """What each call of ``verb`` took, in nanoseconds, the reading of the clock (about 50) included."""
    times = []
    for values in arguments:
        start = perf_counter_ns()
        verb(*values)
        times.append(perf_counter_ns() - start)
    return times


def percentile_us(times_ns: Sequence[int], percent: float) -> float:
    """The nearest-rank percentile of times in nanoseconds, in microseconds."""
    ordered = sorted(times_ns)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] / 1000


def show_latency(figures: dict[str, Spread]) -> tuple[str, str]:
    """Median and p99 as two cells of a table."""
    return show(figures["p50_us"]), show(figures["p99_us"])


def latencies(repeats: Sequence[Sequence[int]]) -> dict[str, Spread]:
    """Median and p99 in microseconds of each repeat's times in nanoseconds, with their spread."""
    return {
        "p50_us": spread([percentile_us(times, 50) for times in repeats]),
        "p99_us": spread([percentile_us(times, 99) for times in repeats]),
    }


def resident_growth(build: Callable[[], object], repeats: int) -> list[int]:
    """How many bytes of resident memory each call of ``build`` adds. What was built stays until the end:
    a later one would live in the freed memory of an earlier one and seem to cost nothing."""
    kept, growth = [], []
    for _ in range(repeats):
        before = _resident_bytes()
        kept.append(build())
        growth.append(_resident_bytes() - before)
    return growth


def print_table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]], width: int = 130) -> None:
    """Print ``rows``; every column but the first is right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
