"""What ``parrot demo`` does: start a service, run the map-reduce example and its twin, show the results."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import parrot as P

from ..api import EngineView
from ..config import DEFAULT_MODEL
from ..errors import SetupError
from ..models import install_model
from ..timeline import render_svg
from .measure import Run, ended_calls, engine_views, run_parrot, run_twin, start_service, to_track, warm_up
from .network import RoundTrip
from .report import print_busy, print_calls, print_times

_CHUNK_TOKENS = 237


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command's options; ``rtt_ms`` is the emulated round trip of the client."""

    file: Path | None
    chunks: int
    max_tokens: int
    rtt_ms: int
    out: Path


def run_demo(options: DemoOptions) -> None:
    """Run the demo. Raises :class:`SetupError` naming the fix if something is not installed."""
    console = Console()
    print_busy(console, os.getloadavg()[0], os.cpu_count() or 1)
    example, document = load_examples()
    text = _read(document, options.file)
    _make_folder(options.out)
    title = options.file.name if options.file else document.DEFAULT_TITLE
    outputs = P.Output(max_tokens=options.max_tokens)
    rtt_s = options.rtt_ms / 1000
    network = RoundTrip(rtt_s)
    with _progress(console) as progress:
        url, engines = _start_service(progress, network)
        parts = document.split_text(text, DEFAULT_MODEL, options.chunks, _CHUNK_TOKENS)
        _warm_up(progress, url, example, network)
        # A title of its own for each run, so that neither finds the other's prompts in the cache.
        with _count_calls(progress, url, "Parrot", len(parts) + 1):
            parrot = run_parrot(url, lambda: example.with_parrot(f"{title} (1)", parts, outputs), network)
        with _count_calls(progress, url, "client-orchestrated twin", len(parts) + 1):
            twin = run_twin(
                url,
                lambda client: example.with_openai(client, f"{title} (2)", parts, outputs),
                RoundTrip(rtt_s),
            )
    console.print(Panel(parrot.texts[-1].strip(), title=f"summary of {title}", title_align="left"))
    print_calls(console, parrot)
    print_times(console, parrot, twin, options.rtt_ms)
    model = f"{engines[0].model} in {engines[0].dtype} on {engines[0].device}"
    _draw(options, f"{title}: {len(parts)} parts, {model}", parrot, twin)
    console.print(f"timeline of every call: [bold]{options.out}[/bold]")


def _read(document: ModuleType, file: Path | None) -> str:
    try:
        text: str = document.load_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--file {file} cannot be read as text in UTF-8: {error}") from error
    if not text.strip():
        raise SetupError(f"--file {file} has no text to summarise")
    return text


def _make_folder(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"--out {out}: its folder cannot be made: {error}") from error


def load_examples() -> tuple[ModuleType, ModuleType]:
    """The modules ``map_reduce_summary`` and ``document`` of the examples, which the wheel carries too."""
    if importlib.util.find_spec("openai") is None:
        raise SetupError("the demo's client-orchestrated twin needs the openai client: pip install openai")
    package = Path(__file__).parents[1]
    folders = (package / "examples", package.parents[1] / "examples")  # in a wheel, in a clone
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise SetupError(f"the examples are missing beside {package}; reinstall parrot-serve")
    sys.path.insert(0, str(folder))
    return importlib.import_module("map_reduce_summary"), importlib.import_module("document")


def _start_service(progress: Progress, network: RoundTrip) -> tuple[str, tuple[EngineView, ...]]:
    """An embedded service that Parrot's client reaches over ``network``; waits for its engine."""
    task = progress.add_task("model", total=1.0)
    install_model(DEFAULT_MODEL, lambda step, done: progress.update(task, completed=done, description=step))
    progress.update(task, completed=1.0, description="model is there", visible=False)
    task = progress.add_task("starting manager and engine", total=None)
    url = start_service(network)
    progress.update(task, visible=False)
    _print_plain(progress, "manager and engine are up")
    return url, engine_views(url)


def _warm_up(progress: Progress, url: str, example: ModuleType, network: RoundTrip) -> None:
    task = progress.add_task("first steps of both clients", total=None)
    warm_up(url, example, network)
    progress.update(task, visible=False)


@contextmanager
def _count_calls(progress: Progress, url: str, way: str, total: int) -> Iterator[None]:
    """Show how many calls of a run have ended, while it runs."""
    task = progress.add_task(way, total=total)
    before = len(ended_calls(url))
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(0.25):
            progress.update(task, completed=min(len(ended_calls(url)) - before, total))

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        progress.update(task, completed=total)
    _print_plain(progress, f"{way}: {total} calls ended")


def _print_plain(progress: Progress, line: str) -> None:
    """What the bars say, where there are none because standard output is not a terminal."""
    if progress.disable:
        progress.console.print(line, highlight=False)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _draw(options: DemoOptions, heading: str, parrot: Run, twin: Run) -> None:
    rtt_us = options.rtt_ms * 1000
    tracks = [
        to_track(
            parrot,
            "Parrot",
            f"{parrot.num_requests} requests, a submit and a get beside it: one round trip",
            rtt_us,
            one_trip=True,
        ),
        to_track(
            twin,
            "Client-orchestrated twin",
            f"{twin.num_requests} requests, a round trip around each call; numbered as they arrived",
            rtt_us,
            one_trip=False,
        ),
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(render_svg(heading, tracks))
