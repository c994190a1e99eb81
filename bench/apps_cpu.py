"""Chain and map-reduce summary on the CPU: Parrot against its client-orchestrated twin, on one engine.

SmolLM2 in float32, greedy, fixed output lengths. Both clients are 250 ms away: the twin pays the round trip
on every request, Parrot once. The prefix cache is on for both. Each timed run has a document title of its own
near the head of every prompt, so that all it finds of earlier runs are the few tokens before it; within a run
both sides share what their prompts share. Afterwards each side repeats the other's run, untimed, so that the
texts can be compared.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

import parrot as P
from parrot.cli.measure import Run, engine_views, run_parrot, run_twin, start_service, warm_up
from parrot.cli.network import RoundTrip
from parrot.config import DEFAULT_MODEL
from parrot.models import resolve_model

from .splits import NEAR_TIE, Message, top2_gap
from .timing import of_repeats, print_table, show, spread

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import chain_summary
import map_reduce_summary
from document import load_text, split_text

RTT_S = 0.250
CHUNK_TOKENS = 237
OUTPUTS = P.Output(max_tokens=25, ignore_eos=True)
MAX_IDLE = 0.01


@dataclass(frozen=True, slots=True)
class Workload:
    """``num_steps`` calls follow each other; a client that orchestrates them pays a round trip for each."""

    name: str
    example: ModuleType
    num_chunks: int
    num_steps: int
    is_chain: bool


@dataclass(slots=True)
class Measured:
    """All runs of one workload."""

    parrot_s: list[float] = field(default_factory=list)
    twin_s: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    texts_compared: int = 0
    gaps: list[float] = field(default_factory=list)  # top-2 logit gap of each split


class Recorder(RoundTrip):
    """Keeps the chat messages of each request, in the order in which they were sent."""

    def __init__(self, rtt_s: float) -> None:
        super().__init__(rtt_s)
        self.messages: list[list[Message]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Record ``request`` and send it."""
        body = json.loads(request.content)
        self.messages.append([(message["role"], message["content"]) for message in body["messages"]])
        return await RoundTrip.handle_async_request(self, request)


def run(quick: bool) -> dict[str, Any]:
    """Measure both workloads; ``ok`` says whether every check held."""
    num_runs = 1 if quick else 5
    chain, parallel = (4, 6) if quick else (8, 16)
    workloads = [
        Workload("chain", chain_summary, chain, chain, True),
        Workload("map-reduce", map_reduce_summary, parallel, 2, False),
    ]
    network = RoundTrip(RTT_S)
    url = start_service(network)
    text = load_text()
    warm_up(url, map_reduce_summary, network)
    results = []
    for workload in workloads:
        parts = split_text(text, DEFAULT_MODEL, workload.num_chunks, CHUNK_TOKENS)
        measured = Measured()
        for index in range(num_runs):
            _measure_pair(url, network, workload, parts, index, measured)
        results.append(_judge(workload, measured))
    _print_table(results)
    return {"ok": all(result["ok"] for result in results), "workloads": results}


def _measure_pair(
    url: str, network: RoundTrip, workload: Workload, parts: list[str], index: int, measured: Measured
) -> None:
    """Both sides once, in turns as to who goes first, then the comparison of their texts."""
    titles = [f"Chapter {100 + 2 * index + side}: compound statements" for side in (0, 1)]
    recorder = Recorder(RTT_S)

    def parrot(title: str) -> Run:
        return run_parrot(url, lambda: workload.example.with_parrot(title, parts, OUTPUTS), network)

    def twin(title: str, own: RoundTrip) -> Run:
        return run_twin(url, lambda c: workload.example.with_openai(c, title, parts, OUTPUTS), own)

    def time_parrot() -> Run:
        before_us = _busy_us(url)
        result = parrot(titles[0])
        measured.parrot_s.append(result.makespan_s)
        measured.idle.append(1 - (_busy_us(url) - before_us) / result.runnable_us)
        return result

    def time_twin() -> Run:
        result = twin(titles[1], recorder)
        measured.twin_s.append(result.makespan_s)
        return result

    order: list[Callable[[], Run]] = [time_parrot, time_twin]
    runs = {step: step() for step in (order if index % 2 == 0 else order[::-1])}
    repeat = Recorder(0.0)
    _compare(workload, runs[time_parrot], twin(titles[0], repeat), repeat.messages, measured)
    _compare(workload, parrot(titles[1]), runs[time_twin], recorder.messages, measured)
    print(
        f"{workload.name} {index + 1}: {measured.parrot_s[-1]:.2f} s, twin {measured.twin_s[-1]:.2f} s",
        flush=True,
    )


def _compare(
    workload: Workload, parrot: Run, twin: Run, messages: list[list[Message]], measured: Measured
) -> None:
    """Compare texts call by call, as long as the calls had the same prompts."""
    split_before = False
    for index, (ours, theirs) in enumerate(zip(parrot.texts, twin.texts, strict=True)):
        reads_others = index > 0 if workload.is_chain else index == len(twin.texts) - 1
        if split_before and reads_others:
            return
        measured.texts_compared += 1
        if ours != theirs:
            split_before = True
            directory = resolve_model(DEFAULT_MODEL)
            max_tokens = OUTPUTS.sampling.max_tokens or 0
            measured.gaps.append(top2_gap(directory, messages[index], ours, theirs, max_tokens))


def _judge(workload: Workload, measured: Measured) -> dict[str, Any]:
    parrot_s, twin_s = statistics.median(measured.parrot_s), statistics.median(measured.twin_s)
    bound_s = twin_s - (workload.num_steps - 1) * RTT_S + 0.05 * twin_s
    idle = statistics.median(measured.idle)
    checks = {
        "makespan": parrot_s <= bound_s,
        "idle": idle <= MAX_IDLE,
        "texts": all(gap < NEAR_TIE for gap in measured.gaps),
    }
    size = f"{workload.num_chunks} x {CHUNK_TOKENS} in / {OUTPUTS.sampling.max_tokens} out"
    return {
        "workload": f"{workload.name}, {size}",
        "runs": len(measured.parrot_s),
        "parrot_s": [round(value, 3) for value in measured.parrot_s],
        "twin_s": [round(value, 3) for value in measured.twin_s],
        "parrot_median_s": round(parrot_s, 3),
        "twin_median_s": round(twin_s, 3),
        "bound_s": round(bound_s, 3),
        "idle_share": [round(value, 5) for value in measured.idle],
        "texts_compared": measured.texts_compared,
        "splits": len(measured.gaps),
        "split_gaps": measured.gaps,
        "checks": checks,
        "ok": all(checks.values()),
    }


def _print_table(results: list[dict[str, Any]]) -> None:
    title = f"seconds, {of_repeats(results[0]['runs'])}; {RTT_S * 1000:.0f} ms round trip"
    rows = []
    for result in results:
        failed = [name for name, held in result["checks"].items() if not held]
        rows.append(
            [
                result["workload"].partition(" in /")[0],
                show(spread(result["parrot_s"]), 1),
                show(spread(result["twin_s"]), 1),
                f"{result['splits']}/{result['texts_compared']}",
                f"failed: {', '.join(failed)}" if failed else "ok",
            ]
        )
    columns = ("workload", "Parrot", "twin", "splits", "checks")
    print_table(title, columns, rows)


def _busy_us(url: str) -> int:
    return sum(engine.stats.get("busy_us", 0) for engine in engine_views(url))
