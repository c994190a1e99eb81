"""Terminal tables: nothing is cut off, on a narrow terminal either."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from parrot.cli.measure import Run
from parrot.cli.report import print_busy, print_calls, print_times
from test_timeline import make_call

CALLS = tuple(make_call("summarise_part", 0, 0, 100_000 * i, 200_000 * i, 900_000) for i in range(1, 13))
RUN = Run(("text",) * 12, 0, 1_000_000, CALLS, 3)


@pytest.mark.parametrize("width", [80, 130])
def test_every_call_is_one_line_with_all_its_numbers(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    print_calls(console, RUN)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    rows = [line.split() for line in text.splitlines() if "engine-0" in line]
    assert [row[:2] for row in rows] == [["summarise_part", str(i)] for i in range(1, 13)]
    assert rows[1][2:9] == ["engine-0", "262", "25", "25", "200", "200", "500"]


def test_bars_lie_where_the_call_ran() -> None:
    console = Console(file=io.StringIO(), width=186)  # a cell of the bar is one hundredth of the run
    print_calls(console, RUN)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    bar = next(line for line in text.splitlines() if "summarise_part 4 " in line)[-102:].strip()
    assert bar == "─" * 40 + "█" * 50


def test_both_times_are_printed_with_their_requests() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_times(console, RUN, replace(RUN, num_requests=12), 250)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split()[-3:] for line in text.splitlines()[1:3]] == [["1.00", "s", "3"], ["1.00", "s", "12"]]
    assert "250 ms" in text
    assert "a get that lasts over 20 s is asked again" in " ".join(text.split())


@pytest.mark.parametrize(("load", "said"), [(2.0, False), (2.1, True)])
def test_a_busy_machine_is_named(load: float, said: bool) -> None:
    console = Console(file=io.StringIO(), width=80)
    print_busy(console, load, num_cores=4)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert (f"a load of {load} on 4 cores" in text) == said
