"""``parrot doctor``: what is missing or wrong on this machine, each with its fix."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ..config import DEFAULT_MODEL


def doctor(
    model: Annotated[str, typer.Option(help="The model that will be served.")] = DEFAULT_MODEL,
    port: Annotated[int, typer.Option(help="The port that will be served on.")] = 8642,
    json_output: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check this machine for what Parrot needs.

    Exit code 1 if something of that is broken."""
    from .checks import run_checks

    checks = run_checks(model, port)
    if json_output:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print_table([(check.name, check.status, check.detail, check.fix) for check in checks])
    raise typer.Exit(1 if any(check.status == "broken" for check in checks) else 0)


def _print_table(rows: list[tuple[str, str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": ("✓", "green"), "optional": ("-", "yellow"), "broken": ("✗", "bold red")}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in ("mark", "name", "detail"):
        table.add_column(overflow="fold")
    for name, status, detail, fix in rows:
        mark, style = marks[status]
        text = Text(detail)
        if fix:
            text.append(f"\nfix: {fix}", style="bold")
        table.add_row(Text(mark, style=style), Text(name), text)
    Console().print(table)
    broken = sum(status == "broken" for _, status, _, _ in rows)
    Console().print(f"{broken} to fix" if broken else "ready", style="bold red" if broken else "bold green")
