"""A thousand engines and more: mixed applications of many tenants, and how fast that is simulated."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import mean

from parrot.manager.key_file import KeyFile, TenantLimits, render_key_file

from .applications import Application, Argument, chain_summary, map_reduce, request, text
from .figure import Figure, Point
from .world import Arm, World, simulate

ENGINES = {"Parrot": (1000, 4000), "no affinity": (1000,)}
ARMS = (Arm("Parrot"), Arm("no affinity", ("prefix_affinity",)))
RATE_PER_ENGINE = 0.25  # applications per second
SECONDS = 4
NUM_TENANTS, NUM_TEMPLATES, TEMPLATE = 50, 200, 2000


def run(seeds: range, *, quick: bool) -> Figure:
    """A sweep over the number of engines."""
    points = []
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys.json"
        tenants = {f"t{n}": TenantLimits() for n in range(NUM_TENANTS)}
        keys.write_bytes(render_key_file(KeyFile(tenants=tenants)))
        for arm in ARMS:
            for num_engines in (100,) if quick else ENGINES[arm.name]:
                for seed in seeds:
                    points.append(_point(arm, num_engines, seed, keys))
    return Figure(
        "scale",
        f"mixed applications, {RATE_PER_ENGINE:g}/s an engine for {SECONDS} s (LLaMA-7B, H200)",
        points,
        x_label="engines",
    )


def _point(arm: Arm, num_engines: int, seed: int, keys: Path) -> Point:
    load = workload(RATE_PER_ENGINE * num_engines, SECONDS, seed)
    ran = simulate(
        arm,
        load,
        seed=seed,
        cost="h200-llama-7b",
        num_engines=num_engines,
        api_keys=keys,
        heartbeat_s=5.0,
        lost_after_s=30.0,
    )
    done, placed = ran.world.done, ran.placements["placed"]
    figures = {
        "ms/token": mean(one.ms_per_token for one in done),
        "cached %": 100 * sum(o.cached_tokens for o in done) / sum(o.prompt_tokens for o in done),
        "calls": placed,
        "events/s": ran.num_events / ran.wall_s,
        "wall s per simulated s": ran.wall_s / ran.simulated_s,
    }
    return Point(arm.name, num_engines, seed, figures)


def workload(rate: float, seconds: float, seed: int) -> Callable[[World], Awaitable[None]]:
    """Applications of Zipf-distributed tenants; a template belongs to one of them."""
    rng = random.Random(seed)
    templates = [text(rng, TEMPLATE) for _ in range(NUM_TEMPLATES)]

    async def run(world: World) -> None:
        tasks = []
        end_s = world.loop.time() + seconds
        while world.loop.time() < end_s:
            tasks.append(asyncio.create_task(world.run(_application(rng, templates))))
            await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*tasks)

    return run


def _application(rng: random.Random, templates: list[str]) -> Application:
    tenant = _zipf(rng, NUM_TENANTS)
    kind = rng.choices(("chat", "gpts", "chain", "map-reduce"), (4, 4, 1, 1))[0]
    if kind == "chain":
        made = chain_summary(rng, 5, 474, 50)
    elif kind == "map-reduce":
        made = map_reduce(rng, 10, 474, 50)
    elif kind == "chat":
        made = request(kind, (text(rng, 300),), 200)
    else:
        template = _zipf(rng, NUM_TEMPLATES)
        tenant = template % NUM_TENANTS
        made = request(kind, (templates[template], Argument(" " + text(rng, 30))), 200)
    return Application(made.kind, made.steps, tenant=f"t{tenant}")


def _zipf(rng: random.Random, count: int) -> int:
    """A rank below ``count``, each 1 / (rank + 1) as likely as the first."""
    return min(int((count + 1) ** rng.random()) - 1, count - 1)
