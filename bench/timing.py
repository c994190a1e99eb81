"""What benchmarks have in common: spreads, percentiles, resident memory, tables, the line of the result."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import fill
from time import perf_counter_ns

from rich import box
from rich.console import Console
from rich.table import Table

Spread = dict[str, float]
LINE = 80  # columns of a terminal: text is filled to them, and tables keep within them where they can


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most of one figure over its repeats, to four digits."""
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def show(figure: Spread, digits: int = 2) -> str:
    """A spread as a cell of a table; of a single run, its figure alone."""
    median, least, most = (f"{figure[name]:,.{digits}f}" for name in ("median", "least", "most"))
    return median if figure["least"] == figure["most"] else f"{median} ({least} to {most})"


def per(unit: float, figure: Spread) -> Spread:
    """The same in ``unit``."""
    return {name: value / unit for name, value in figure.items()}


def of_repeats(count: int) -> str:
    """What the cells of :func:`show` are, for the title of a table."""
    return f"median (least to most) of {count}" if count > 1 else "a single run"


def print_result(result: object) -> None:
    """The last line, for programs: on a terminal it would be pages of JSON, so it is left out there."""
    if not sys.stdout.isatty():
        print(f"RESULT {json.dumps(result)}", flush=True)


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
    """Print ``rows`` below their title; every column but the first is right-aligned."""
    print(fill(title, LINE))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)
    print(flush=True)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
