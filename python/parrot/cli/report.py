"""Terminal tables of measured runs."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..api import CallView
from ..timeline import Kind, call_labels, call_phases
from .measure import Run

_COLUMNS_WIDTH = 86  # of all columns but the bar
_MIN_BAR_CELLS = 34  # the width of its heading
_STYLES: dict[Kind, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "queue": ("─", "bright_black"),
    "prefill": ("█", "yellow"),
    "decode": ("█", "blue"),
}


def print_calls(console: Console, run: Run) -> None:
    """A row per call: engine, tokens, milliseconds in each phase, and its place in the run."""
    bar_cells = console.width - _COLUMNS_WIDTH
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="calls of the Parrot run, times in ms")
    table.title_justify, table.title_style = "left", "bold"
    for column in ("call", "engine"):
        table.add_column(column, no_wrap=True)
    for column in ("in", "cached", "out", "queue", "prefill", "decode"):
        table.add_column(column, justify="right", no_wrap=True)
    if bar_cells >= _MIN_BAR_CELLS:
        table.add_column("queue ─  prefill [yellow]█[/]  decode [blue]█[/]", no_wrap=True)
    for call, label in zip(run.calls, call_labels(run.calls), strict=True):
        took = {phase.kind: (phase.end_us - phase.begin_us) / 1000 for phase in call_phases(call)}
        table.add_row(
            label,
            call.engine or "-",
            *(f"{count}" for count in (call.prompt_tokens, call.cached_tokens, call.output_tokens)),
            *(f"{took.get(kind, 0.0):.0f}" for kind in ("queue", "prefill", "decode")),
            *([_bar(run, call, bar_cells)] if bar_cells >= _MIN_BAR_CELLS else []),
        )
    console.print(table)


def print_busy(console: Console, load: float, num_cores: int) -> None:
    """A line if ``load``, the processes that want to run, takes more than half of the cores at the start."""
    if load > num_cores / 2:
        console.print(
            f"This machine is busy: a load of {load:.1f} on {num_cores} cores. The times below suffer, "
            "and not alike.",
            style="yellow",
            highlight=False,
        )


def print_times(console: Console, parrot: Run, twin: Run, rtt_ms: int) -> None:
    """Both makespans and what they are made of."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    table.add_column("answer after", justify="right")
    table.add_column("requests", justify="right")
    for name, run in (("Parrot", parrot), ("client-orchestrated twin", twin)):
        table.add_row(name, f"{run.makespan_s:.2f} s", str(run.num_requests))
    console.print(table)
    console.print(
        f"A round trip of {rtt_ms} ms is emulated. Parrot's requests, a submit and a get that leaves beside "
        "it, take one in all (a get that lasts over 20 s is asked again); the twin's take one each.",
        style="dim",
    )
    console.print("One run of each, Parrot's first: a look, no measurement (python -m bench).", style="dim")


def _bar(run: Run, call: CallView, num_cells: int) -> Text:
    """The call's phases on the scale of the run."""
    cells: list[tuple[str, str]] = [(" ", "")] * num_cells
    span_us = run.end_us - run.begin_us
    for phase in call_phases(call):
        begin = int((phase.begin_us - run.begin_us) / span_us * num_cells)
        end = min(max(int((phase.end_us - run.begin_us) / span_us * num_cells), begin + 1), num_cells)
        cells[begin:end] = [_STYLES[phase.kind]] * (end - begin)
    return Text.assemble(*cells)
