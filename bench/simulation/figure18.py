"""Figures 18a and 18b: multi-agent programming of N files on one engine: time, and KV memory."""

from __future__ import annotations

import random

from .applications import multi_agent
from .figure import Figure, Point
from .world import BASELINE_OFF, Arm, World, simulate

LATENCY_TOKENS = 7096
ARMS = (
    Arm("Parrot"),
    Arm("per-request kernel", share_prefixes=False),
    Arm("no sharing", cache_prefixes=False, share_prefixes=False),
    Arm("throughput-centric", BASELINE_OFF, whole_graph=False, cache_prefixes=False, share_prefixes=False),
    Arm(
        "latency-centric",
        BASELINE_OFF,
        whole_graph=False,
        capacity_tokens=LATENCY_TOKENS,
        cache_prefixes=False,
        share_prefixes=False,
    ),
    Arm("throughput-centric, caching", BASELINE_OFF, whole_graph=False),
)
FILES = (4, 8, 12, 16)
KV_GB = 819_200 / 1e9  # per token
_PAPER = {
    "Parrot": (183.9, 195.4, 205.4, 213.8),
    "per-request kernel": (185.3, 201.4, 232.8, 248.7),
    "throughput-centric": (234.0, 307.9, 422.2, 519.5),
    "latency-centric": (543.0, 957.0, 1489.0, 1903.0),
}


def run(seeds: range, *, quick: bool) -> Figure:
    """A sweep over the number of files."""
    points = []
    for arm in ARMS:
        for num_files in FILES[:2] if quick else FILES:
            for seed in seeds:
                points.append(_point(arm, num_files, seed))
    paper = {
        arm: {f"application s @ {n}": value for n, value in zip(FILES, values, strict=True)}
        for arm, values in _PAPER.items()
    }
    return Figure(
        "18",
        "multi-agent programming on one engine (LLaMA-13B, A100)",
        points,
        x_label="files",
        paper=paper,
        log_y=True,
    )


def _point(arm: Arm, num_files: int, seed: int) -> Point:
    application = multi_agent(random.Random(seed), num_files)

    async def load(world: World) -> None:
        await world.run(application)

    world = simulate(arm, load, seed=seed, cost="a100-llama-13b", num_engines=1).world
    figures = {"application s": world.done[0].latency_s, "peak KV GB": world.peak_kv_tokens * KV_GB}
    return Point(arm.name, num_files, seed, figures)
