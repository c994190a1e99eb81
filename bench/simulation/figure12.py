"""Figures 12a, 12b and 13: chain summaries beside background chat, and many at once, on one engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from statistics import mean

from .applications import chain_summary, document_chunks, request, text
from .figure import Figure, Point
from .world import BASELINE_OFF, Arm, Done, World, simulate

CAPACITY = 4096  # of the original, in both arms
ARMS = (
    Arm("Parrot"),
    Arm("client-orchestrated", BASELINE_OFF, whole_graph=False),
    Arm("Parrot, not application_order", ("application_order",)),
)
# With aging an application keeps its place for the first minute that it runs; the longest take more.
ARMS_AT_ONCE = (ARMS[0], ARMS[1], Arm("Parrot, not aging", ("aging",)))
NUM_CHUNKS = 66
BACKGROUND = (0.0, 1.0, 2.0, 3.0, 3.5)
APPLICATIONS = (10, 15, 20, 25)


def run_background(seeds: range, *, quick: bool) -> Figure:
    """12a: a chain of 66 chunks of 474 tokens, 50 out, beside requests of 512 in and 50 out."""
    points = []
    for arm in ARMS:
        for rate in BACKGROUND[::2] if quick else BACKGROUND:
            for seed in seeds:
                load = _beside_background(rate, 20 if quick else NUM_CHUNKS, seed)
                world = _simulate(arm, load, seed)
                figures = {"chain s": mean(one.latency_s for one in world.of("chain"))}
                background = world.of("background")
                figures["background s"] = mean(one.latency_s for one in background) if background else 0.0
                points.append(Point(arm.name, rate, seed, figures))
    paper = {
        "Parrot": (75.8, 93.8, 100.0, 103.7, 104.7),
        "client-orchestrated": (99.7, 107.2, 125.8, 179.0, 302.0),
    }
    return Figure(
        "12a",
        "chain summary beside background chat (LLaMA-13B, A100)",
        points,
        x_label="background requests/s",
        paper={
            arm: {f"chain s @ {x:g}": value for x, value in zip(BACKGROUND, values, strict=True)}
            for arm, values in paper.items()
        },
    )


def run_many(seeds: range, *, quick: bool) -> tuple[Figure, Figure]:
    """12b: N chains at once, chunks of 939 tokens; 13: what each of them gains at the largest N."""
    counts = APPLICATIONS[:1] if quick else APPLICATIONS
    points: list[Point] = []
    each: dict[tuple[str, int], list[float]] = {}
    for arm in ARMS_AT_ONCE:
        for count in counts:
            for seed in seeds:
                world = _simulate(arm, _at_once(count, seed), seed)
                points.append(
                    Point(arm.name, count, seed, {"chain s": mean(o.latency_s for o in world.done)})
                )
                if count == counts[-1]:
                    each[arm.name, seed] = _latencies(world)
    paper = {
        "Parrot": (81.7, 113.3, 143.7, 174.6),
        "client-orchestrated": (112.8, 171.9, 234.7, 292.9),
    }
    many = Figure(
        "12b",
        "chain summaries at once (LLaMA-13B, A100)",
        points,
        x_label="applications",
        paper={
            arm: {f"chain s @ {x}": value for x, value in zip(APPLICATIONS, values, strict=True)}
            for arm, values in paper.items()
        },
    )
    return many, _gains(counts[-1], each, seeds)


def _gains(count: int, each: dict[tuple[str, int], list[float]], seeds: range) -> Figure:
    points: list[Point] = []
    notes = []
    for name in (ARMS_AT_ONCE[0].name, ARMS_AT_ONCE[2].name):
        slower = 0
        for seed in seeds:
            pairs = zip(each[ARMS[1].name, seed], each[name, seed], strict=True)
            gains = sorted(baseline - ours for baseline, ours in pairs)
            slower += sum(gain < 0 for gain in gains)
            points += [Point(name, n, seed, {"gain s": gain}) for n, gain in enumerate(gains, 1)]
        notes.append(f"{name} makes {slower} of {count * len(seeds)} applications slower (the paper: none)")
    title = f"seconds saved against client-orchestrated, {count} chains sorted by gain"
    return Figure("13", title, points, x_label="application", notes=notes)


def _simulate(arm: Arm, load: Callable[[World], Awaitable[None]], seed: int) -> World:
    return simulate(
        arm, load, seed=seed, cost="a100-llama-13b", num_engines=1, capacity_tokens=CAPACITY
    ).world


def _latencies(world: World) -> list[float]:
    """By application, as they were started."""
    return [one.latency_s for one in sorted(world.done, key=lambda one: one.number)]


def _beside_background(rate: float, num_chunks: int, seed: int) -> Callable[[World], Awaitable[None]]:
    document = chain_summary(random.Random(seed), num_chunks, 474, 50)

    async def run(world: World) -> None:
        chats: list[asyncio.Task[Done]] = []
        chat_rng = random.Random(seed + 1000)

        async def background() -> None:
            while True:
                await asyncio.sleep(chat_rng.expovariate(rate))
                application = request("background", (text(chat_rng, 512),), 50)
                chats.append(asyncio.create_task(world.run(application)))

        task = asyncio.create_task(background()) if rate else None
        await world.run(document)
        if task is not None:
            task.cancel()
        await asyncio.gather(*chats)

    return run


def _at_once(count: int, seed: int) -> Callable[[World], Awaitable[None]]:
    rng = random.Random(seed)
    documents = [chain_summary(rng, document_chunks(rng, 939), 939, 50) for _ in range(count)]

    async def run(world: World) -> None:
        await asyncio.gather(*map(world.run, documents))

    return run
