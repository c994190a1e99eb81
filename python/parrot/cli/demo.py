"""``parrot demo``: a real application on this machine, both ways, with a picture of where the time went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    file: Annotated[
        Path | None, typer.Option(help="A text to summarise, instead of Python's manual.")
    ] = None,
    chunks: Annotated[int, typer.Option(help="Parts that are summarised in parallel.", min=2, max=64)] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each summary.", min=1, max=512)] = 80,
    rtt_ms: Annotated[
        int, typer.Option(help="Emulated round trip between client and service.", min=0, max=5000)
    ] = 250,
    out: Annotated[Path, typer.Option(help="Where the timeline goes.")] = Path("out/timeline.svg"),
) -> None:
    """Summarise a document with Parrot and without it, and draw both.

    By map-reduce; the other way is orchestrated by a client. The timeline shows every call."""
    from .demo_run import DemoOptions, run_demo

    run_demo(DemoOptions(file, chunks, max_tokens, rtt_ms, out))
