"""Figure 17: four GPTs applications, each with a system prompt of its own, on four engines."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from statistics import mean

from .applications import Application, Argument, request, text
from .figure import Figure, Point
from .world import Arm, World, at_intervals, simulate

# (system prompt, query, output) in tokens
GPTS = ((7437, 7, 704), (1116, 8, 89), (1694, 4, 631), (2031, 4, 416))
ARMS = (
    Arm("Parrot"),
    Arm("no affinity", ("prefix_affinity",)),
    Arm("per-request kernel", share_prefixes=False),
    Arm("no sharing", ("prefix_affinity",), share_prefixes=False, cache_prefixes=False),
)
RATES = (1.0, 4.0, 8.0, 16.0, 32.0)
SECONDS = 20
CAPACITY = 53_000  # all that an engine holds: nothing is mixed here that would want less
TWICE = 2.0  # a rate is sustained while the mean is within so many times that of the lowest rate


def workload(rate: float, seconds: int, seed: int) -> Callable[[World], Awaitable[None]]:
    """The same requests for every arm: the four applications equally often."""
    rng = random.Random(seed)
    prompts = [text(rng, num_prompt) for num_prompt, _, _ in GPTS]
    requests: list[Application] = []
    for _ in range(round(rate * seconds)):
        which = rng.randrange(len(GPTS))
        _, num_query, num_output = GPTS[which]
        requests.append(request("gpts", (prompts[which], Argument(" " + text(rng, num_query))), num_output))

    async def run(world: World) -> None:
        await at_intervals(world, rate, requests)

    return run


def run(seeds: range, *, quick: bool) -> Figure:
    """A sweep over arrival rates."""
    points = []
    for arm in ARMS:
        for rate in RATES[:3] if quick else RATES:
            for seed in seeds:
                load = workload(rate, 10 if quick else SECONDS, seed)
                world = simulate(
                    arm,
                    load,
                    seed=seed,
                    cost="a6000-llama-7b",
                    num_engines=4,
                    latency_capacity_tokens=CAPACITY,
                ).world
                points.append(
                    Point(arm.name, rate, seed, {"ms/token": mean(o.ms_per_token for o in world.done)})
                )
    figure = Figure(
        "17",
        f"four GPTs applications on four engines (LLaMA-7B, A6000), {SECONDS} s of arrivals",
        points,
        x_label="requests/s",
        paper={
            "Parrot": _paper((1, 2, 4, 8, 16, 32), (32.0, 34.8, 44.0, 76.8, 125.7, 375.5)),
            "per-request kernel": _paper((1, 2, 4, 8, 16, 32), (41.8, 59.0, 90.7, 133.4, 194.3, 345.4)),
            "no sharing": _paper((1, 2), (218.9, 775.0)),
        },
        log_y=True,
    )
    return Figure(
        figure.number, figure.title, points, figure.x_label, figure.paper, True, [sustained(figure)]
    )


def sustained(figure: Figure) -> str:
    """The highest rate that each arm sustains (evaluation: within twice the mean at the lowest rate)."""
    found = []
    for arm in figure.arms:
        medians = [(x, spread["median"]) for x in figure.xs if (spread := figure.at(arm, x, "ms/token"))]
        limit = TWICE * medians[0][1]
        kept = [x for x, value in medians if value <= limit]
        lost = [x for x, value in medians if value > limit]
        highest = max(x for x in kept if not lost or x < lost[0])
        found.append(f"{arm} {highest:g}/s")
    return "sustained: " + ", ".join(found)


def _paper(rates: tuple[int, ...], values: tuple[float, ...]) -> dict[str, float]:
    return {f"ms/token @ {rate}": value for rate, value in zip(rates, values, strict=True)}
