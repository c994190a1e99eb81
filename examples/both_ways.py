"""What the agent-like examples share: a command line, the twins' requests, and a comparison of both ways."""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import parrot as P
from parrot.api import CallView, GraphReply
from parrot.cli.network import RoundTrip

RTT_MS = 250.0  # between a client and a service that it does not start itself
MAX_SHOWN = 3  # results that are printed


@dataclass(slots=True)
class Tally:
    """What the calls of one way came to."""

    seconds: float = 0.0
    num_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Asker:
    """Calls of a client that orchestrates them itself: each is a request through the openai client."""

    client: AsyncOpenAI
    outputs: P.Output
    model: str = "smollm2"
    tally: Tally = field(default_factory=Tally)

    async def __call__(self, system: str, prompt: str) -> str:
        """The answer to one prompt."""
        sampling = self.outputs.sampling
        reply = await self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "system", "content": system}, {"role": "user", "content": prompt}],
            temperature=0.0,
            max_tokens=sampling.max_tokens,
            extra_body={"ignore_eos": sampling.ignore_eos},
        )
        self.tally.num_calls += 1
        if reply.usage is not None:
            details = reply.usage.prompt_tokens_details
            self.tally.prompt_tokens += reply.usage.prompt_tokens
            self.tally.cached_tokens += (details.cached_tokens or 0) if details is not None else 0
            self.tally.output_tokens += reply.usage.completion_tokens
        return reply.choices[0].message.content or ""


def fill(template: str, **values: str) -> str:
    """A prompt as the service would fill it: each ``{{input:name}}`` of ``template`` by its value."""
    for name, value in values.items():
        template = template.replace(f"{{{{input:{name}}}}}", value)
    return template


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all these examples have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens of an output (default 24)")
    parser.add_argument("--url", help="a running service; by default an embedded one is started")
    parser.add_argument(
        "--api-key", default=os.environ.get("PARROT_API_KEY"), help="its key, if it wants one"
    )
    parser.add_argument(
        "--rtt-ms",
        type=float,
        help=f"emulated round trip of each request of either way; by default {RTT_MS:g} with the embedded "
        "service, which is otherwise no distance away, and 0 with --url",
    )
    return parser


warm_up = P.template("{{input:text}}{{output:end}}", name="warm_up", outputs=P.Output(max_tokens=1))


@dataclass(frozen=True, slots=True)
class Ways:
    """An application written twice. ``parrot`` gives all variables that calls write, the result's last, and
    waits for nothing; ``twin`` gives the result."""

    parrot: Callable[[P.Output], Sequence[P.SemanticVariable]]
    twin: Callable[[Asker], Awaitable[object]]
    num_calls: int
    objective: P.Perf = P.LATENCY
    wait_for: int = 1  # how many of the last variables are the result


def compare(titles: Sequence[str], ways: Ways, options: argparse.Namespace) -> None:
    """Run both ways on one service, one after the other; print Parrot's results, each under its title,
    and a table."""
    console = Console()
    outputs = P.Output(max_tokens=options.max_tokens)
    rtt_s = rtt_ms(options) / 1000
    with progress_bars(console) as bars:
        connection = P.connect(options.url, options.api_key, transport=RoundTrip(rtt_s))
        _say(bars, "starting the service" if connection.embedded else f"using {connection.url}")
        headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        with httpx.Client(base_url=connection.url, headers=headers, timeout=600) as http:
            model = _served_model(http)
            warm_up("Hello").get()  # once the engine has loaded its model
            result, calls, parrot = _run_parrot(bars, http, ways, outputs)
        twin = asyncio.run(_run_twin(bars, connection.url, options.api_key, model, ways, outputs, rtt_s))
    for title, text in list(zip(titles, result, strict=True))[:MAX_SHOWN]:
        console.print(Panel(text.strip() or "(nothing)", title=title, title_align="left"))
    if len(result) > MAX_SHOWN:
        console.print(f"and {len(result) - MAX_SHOWN} more", style="dim")
    print_tallies(console, parrot, twin, calls, rtt_s * 1000)


def rtt_ms(options: argparse.Namespace) -> float:
    """The round trip to emulate, in milliseconds."""
    if options.rtt_ms is not None:
        return float(options.rtt_ms)
    return 0.0 if options.url or os.environ.get("PARROT_URL") else RTT_MS


def _served_model(http: httpx.Client) -> str:
    try:
        models = http.get("/v1/models")
    except httpx.TransportError:
        raise SystemExit(
            f"no Parrot service answers at {http.base_url}; start one with `parrot serve`, or leave out "
            "--url (and PARROT_URL)"
        ) from None
    if models.is_error:
        raise SystemExit(f"{http.base_url}: {models.json()['error']['message']}")
    name: str = models.json()["data"][0]["id"]
    return name


def _run_parrot(
    bars: Progress, http: httpx.Client, ways: Ways, outputs: P.Output
) -> tuple[list[str], Sequence[CallView], Tally]:
    begin = time.perf_counter()
    with P.session():
        variables = ways.parrot(outputs)
        with _counted(bars, http, variables, ways.num_calls, begin):
            result = [str(text) for text in P.gather(*variables[-ways.wait_for :], perf=ways.objective)]
        seconds = time.perf_counter() - begin
        calls = _graph(http, variables).calls
    return (
        result,
        calls,
        Tally(
            seconds,
            len(calls),
            sum(call.prompt_tokens for call in calls),
            sum(call.cached_tokens for call in calls),
            sum(call.output_tokens for call in calls),
        ),
    )


async def _run_twin(
    bars: Progress, url: str, api_key: str | None, model: str, ways: Ways, outputs: P.Output, rtt_s: float
) -> Tally:
    # The openai client takes httpx clients whichever HTTP package its own version types them with.
    http: Any = httpx.AsyncClient(transport=RoundTrip(rtt_s), timeout=600)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key or "none", http_client=http) as client:
        asker = Asker(client, outputs, model)
        task = bars.add_task("client's twin", total=ways.num_calls)
        begin = time.perf_counter()
        running = asyncio.ensure_future(ways.twin(asker))
        while not running.done():
            await asyncio.wait([running], timeout=0.25)
            bars.update(task, completed=asker.tally.num_calls)
        await running
        asker.tally.seconds = time.perf_counter() - begin
    _say(bars, f"client's twin: {asker.tally.num_calls} calls, {asker.tally.seconds:.1f} s")
    return asker.tally


def _graph(http: httpx.Client, variables: Sequence[P.SemanticVariable]) -> GraphReply:
    session = next(variable.session for variable in variables if variable.session is not None)
    reply = http.get(f"/v1/session/{session.id}/graph").raise_for_status()
    return GraphReply.model_validate_json(reply.content)


@contextmanager
def _counted(
    bars: Progress,
    http: httpx.Client,
    variables: Sequence[P.SemanticVariable],
    num_calls: int,
    begin: float,
) -> Iterator[None]:
    """Show how many calls of the session have ended since ``begin``, while the block waits for them."""
    task = bars.add_task("Parrot", total=num_calls)
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(0.25):
            reply = http.get(f"/v1/session/{session_id}/graph") if session_id else None
            if reply is not None and reply.is_success:
                calls = GraphReply.model_validate_json(reply.content).calls
                bars.update(task, completed=sum(call.state == "done" for call in calls))

    session_id = next((v.session.id for v in variables if v.session is not None), None)
    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    bars.update(task, completed=num_calls)
    _say(bars, f"Parrot: {num_calls} calls, {time.perf_counter() - begin:.1f} s")


def progress_bars(console: Console) -> Progress:
    """Bars on a terminal; elsewhere :func:`_say` prints lines in their place."""
    columns = (TextColumn("{task.description:<26}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _say(bars: Progress, line: str) -> None:
    if bars.disable:
        bars.console.print(line, highlight=False)


def print_tallies(
    console: Console, parrot: Tally, twin: Tally, calls: Sequence[CallView], rtt_ms: float
) -> None:
    """Both ways side by side, and how the service saw the calls of Parrot's way."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in ("seconds", "calls", "prompt tokens", "cached", "output tokens"):
        table.add_column(column, justify="right")
    for name, tally in (("Parrot", parrot), ("client's twin", twin)):
        table.add_row(
            name,
            f"{tally.seconds:.2f}",
            str(tally.num_calls),
            f"{tally.prompt_tokens:,}",
            f"{tally.cached_tokens:,}",
            f"{tally.output_tokens:,}",
        )
    console.print(table)
    distance = (
        f"Every request of either way takes an emulated round trip of {rtt_ms:g} ms (--rtt-ms)."
        if rtt_ms
        else "No network delay is emulated (--rtt-ms)."
    )
    groups = {call.task_group for call in calls if call.task_group is not None}
    num_latency = sum(call.objective == "LATENCY" for call in calls)
    console.print(
        f"Of Parrot's calls {num_latency} were latency-sensitive and {len(calls) - num_latency} for "
        f"throughput, in {len(groups)} task groups. {distance} "
        "Texts, and so the tokens of later prompts, may differ between the ways: what else is in a batch "
        "changes how sums are rounded. "
        "One run of each, Parrot's first: a look, no measurement (python -m bench).",
        style="dim",
    )
