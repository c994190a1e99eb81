"""Figure 19: 40 chats at one per second, joined after 15 s by nine map-reduce summaries, on four engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from statistics import mean

from .applications import Application, document_chunks, map_reduce, request, text
from .figure import Figure, Point
from .world import BASELINE_OFF, Arm, Done, World, at_intervals, simulate

LATENCY_TOKENS = 6144
ARMS = (
    Arm("Parrot"),
    Arm("latency-centric", BASELINE_OFF, whole_graph=False, capacity_tokens=LATENCY_TOKENS),
    Arm("throughput-centric", BASELINE_OFF, whole_graph=False),
    Arm("Parrot, not objective_aware", ("objective_aware",)),
    Arm("Parrot, no group_placement", ("group_placement",)),
)
CHUNK, OUTPUT = 474, 50


def chat(rng: random.Random) -> Application:
    """Prompts of up to 1,024 tokens, 2,048 with the answer."""
    num_prompt = min(max(round(rng.lognormvariate(5.3, 1.0)), 16), 1024)
    num_output = min(max(round(rng.lognormvariate(5.3, 0.7)), 16), 1024)
    return request("chat", (text(rng, num_prompt),), num_output)


def workload(num_chats: int, num_documents: int, seed: int) -> Callable[[World], Awaitable[None]]:
    """The same applications for every arm."""
    rng = random.Random(seed)
    chats = [chat(rng) for _ in range(num_chats)]
    documents = [map_reduce(rng, document_chunks(rng, CHUNK), CHUNK, OUTPUT) for _ in range(num_documents)]

    async def run(world: World) -> None:
        async def later() -> list[Done]:
            await asyncio.sleep(15)
            return list(await asyncio.gather(*map(world.run, documents)))

        await asyncio.gather(at_intervals(world, 1.0, chats), later())

    return run


def run(seeds: range, *, quick: bool) -> Figure:
    """One point per arm and seed."""
    points = []
    for arm in ARMS:
        for seed in seeds:
            load = workload(20 if quick else 40, 3 if quick else 9, seed)
            world = simulate(arm, load, seed=seed, cost="a6000-llama-7b", num_engines=4).world
            chats = world.of("chat")
            figures = {
                "chat ms/token": mean(one.ms_per_token for one in chats),
                "chat decode ms": mean(one.decode_ms for one in chats),
                "map-reduce s": mean(one.latency_s for one in world.of("map-reduce")),
            }
            points.append(Point(arm.name, 0, seed, figures))
    return Figure(
        "19",
        "chat and map-reduce on four engines (LLaMA-7B, A6000)",
        points,
        paper={
            "Parrot": {"chat ms/token": 149, "chat decode ms": 45, "map-reduce s": 23.3},
            "latency-centric": {"chat ms/token": 828, "chat decode ms": 41, "map-reduce s": 86.4},
            "throughput-centric": {"chat ms/token": 185, "chat decode ms": 78, "map-reduce s": 24.5},
        },
    )
