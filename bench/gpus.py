"""The whole service on one GPU and on all of them: four applications whose calls share long prompts.

The four of the paper's figure 17, by tokens, as many calls of each, all there at once. Manager and engines
are processes, started by ``parrot serve --gpus``. On a GPU: LLaMA-7B's shape in fp16 with random weights.
Without one: a tiny shape on engines of the CPU, which shows that it runs, not how fast.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from parrot.cli.gpus import num_gpus
from parrot.dummy_model import SHAPES, num_control_tokens, word, write_dummy_model

from .machine import say_no_gpu
from .service_load import START_TIMEOUT_S, ManagerProcess, new_session_id, service_process, until_ready
from .timing import print_table, show, spread

TIMEOUT_S = 300.0
PLACEMENT = ("prefix_affinity", "group_placement")


@dataclass(frozen=True)
class App:
    """Tokens of the prompt that its calls share, of the rest, and of the output."""

    shared: int
    own: int
    output: int


APPS = (App(7437, 7, 704), App(1116, 8, 89), App(1694, 4, 631), App(2031, 4, 416))
QUICK_APPS = (App(60, 7, 12), App(20, 8, 4))


@dataclass(frozen=True)
class Arm:
    """One way to run the service."""

    name: str
    engines: tuple[str, ...]  # options that say which
    num_engines: int
    off: tuple[str, ...] = ()


def run(quick: bool) -> dict[str, Any]:
    """Every arm, its repeats in a row, since engines take a while to start; prints a table."""
    gpus = num_gpus()
    if not gpus:
        say_no_gpu("a tiny model on engines of the CPU, which says nothing of GPUs")
    shape = "llama-7b" if gpus else "tiny"
    apps, calls, repeats = (QUICK_APPS, 3, 1) if quick or not gpus else (APPS, 32, 3)
    with tempfile.TemporaryDirectory() as directory:
        model = write_dummy_model(Path(directory) / shape, shape)
        results = {arm.name: _measure(arm, model, apps, calls, repeats) for arm in arms(gpus)}
    _print(results, apps, calls)
    return {
        "gpus": gpus,
        "model": shape,
        "apps": [app.__dict__ for app in apps],
        "calls": calls,
        "arms": results,
    }


def arms(gpus: int) -> list[Arm]:
    """One engine, all of them, and all of them without placing calls by their prefixes."""
    if gpus == 0:
        one, several, count = ("--engines", "1"), ("--engines", "2"), 2
    else:
        one, several, count = ("--gpus", "0"), ("--gpus", "all"), gpus
    return [
        Arm("1 engine", one, 1),
        Arm(f"{count} engines", several, count),
        Arm(f"{count} engines, prefixes ignored", several, count, PLACEMENT),
    ]


def _measure(arm: Arm, model: Path, apps: tuple[App, ...], calls: int, repeats: int) -> dict[str, Any]:
    """Seconds from the submit to the last value, and what the engines computed for them."""
    with _service(arm, model) as service:
        url = f"http://127.0.0.1:{service.port}"
        asyncio.run(_burst(url, apps, 1, 0))
        before = _totals(url)
        started_s = [asyncio.run(_burst(url, apps, calls, 1 + repeat)) for repeat in range(repeats)]
        after = _totals(url)
    per_burst = {name: round((after[name] - before[name]) / repeats) for name in after}
    seconds = spread(started_s)
    tokens = calls * sum(app.output for app in apps)
    rate = float(f"{tokens / seconds['median']:.4g}")
    print(f"{arm.name}: {seconds['median']:.2f} s, {rate:,.0f} tok/s", flush=True)
    return {"seconds": seconds, "tok_per_s": rate, "per_burst": per_burst}


@contextmanager
def _service(arm: Arm, model: Path) -> Iterator[ManagerProcess]:
    off = [option for name in arm.off for option in ("--off", name)]
    with service_process("serve", "--model", str(model), "--dummy-weights", *arm.engines, *off) as service:
        asyncio.run(until_ready(service.port, arm.num_engines))
        yield service


def _engines(url: str) -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = httpx.get(f"{url}/v1/engines", timeout=TIMEOUT_S).json()["engines"]
    return engines


def _totals(url: str) -> dict[str, int]:
    """Sums over the engines of tokens computed, found in the cache and decoded. Waits for the first heartbeat
    of an engine that has had no call, which brings its statistics."""
    deadline = time.monotonic() + START_TIMEOUT_S
    engines = _engines(url)
    while not all(engine["stats"] for engine in engines):
        if time.monotonic() > deadline:
            raise RuntimeError(f"engines without statistics: {engines}")
        time.sleep(0.05)
        engines = _engines(url)
    names = ("prefill_tokens", "cached_tokens", "decode_tokens", "shared_decodes", "preemptions")
    return {name: sum(engine["stats"][name] for engine in engines) for name in names}


async def _burst(url: str, apps: tuple[App, ...], calls: int, seed: int) -> float:
    """All calls of all applications at once, each application a session of its own."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        started = time.perf_counter()
        await asyncio.gather(*(_application(client, app, calls, (seed, i)) for i, app in enumerate(apps)))
        return time.perf_counter() - started


async def _application(client: httpx.AsyncClient, app: App, calls: int, seed: tuple[int, int]) -> None:
    session = new_session_id()
    body = {
        "session_id": session,
        "create_session": True,
        "calls": [_call(app, index, seed) for index in range(calls)],
    }
    await _post(client, "/v1/submit", body)
    gets = (
        {"session_id": session, "semantic_var_id": f"v-{i}", "criteria": "THROUGHPUT"} for i in range(calls)
    )
    await asyncio.gather(*(_post(client, "/v1/get", get) for get in gets))


async def _post(client: httpx.AsyncClient, path: str, body: object) -> None:
    reply = await client.post(path, json=body)
    if reply.status_code != 200:
        raise RuntimeError(f"{path}: {reply.status_code} {reply.text[:500]}")


def _call(app: App, index: int, seed: tuple[int, int]) -> dict[str, Any]:
    """A call of an application; every burst has prompts of its own."""
    shared = _words(app.shared, (*seed, -1))
    output = {"max_tokens": app.output, "ignore_eos": True}
    return {
        "function": "app",
        "request_id": f"r-{index}",
        "prompt": f"{shared} {{{{input:query}}}}{{{{output:answer}}}}",
        "placeholders": [
            {"name": "query", "kind": "input", "value": _words(app.own, (*seed, index))},
            {"name": "answer", "kind": "output", "semantic_var_id": f"v-{index}", "sampling": output},
        ],
    }


def _words(count: int, seed: tuple[int, ...]) -> str:
    """So many tokens of the smallest shape's vocabulary, the same for the same seed."""
    known = range(num_control_tokens(), int(str(SHAPES["tiny"]["vocab_size"])))
    return " ".join(word(i) for i in random.Random(str(seed)).choices(known, k=count))


def _print(results: dict[str, Any], apps: tuple[App, ...], calls: int) -> None:
    rows = []
    for name, result in results.items():
        counts = [f"{result['per_burst'][what]:,}" for what in ("prefill_tokens", "cached_tokens")]
        rows.append([name, show(result["seconds"]), f"{result['tok_per_s']:,.0f}", *counts])
    title = f"{len(apps)} applications of {calls} calls each, all at once"
    print_table(title, ["service", "s", "tok/s out", "tokens computed", "tokens found"], rows)
