"""The figures of the scheduler's placements beside their targets.

Everything is decided by the scheduler itself and judged in simulated time, so that the figures are those of
any machine. The judge of small cases runs every engine step by step, and sees what the scheduler's estimates
leave out: a prompt takes several steps, calls end one by one. The quick form has the sizes of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..timing import print_table
from .driver import Cost
from .fleets import CachingFleet, choices_among_many, waits_of_cold_calls
from .small_cases import (
    FLEETS,
    SIX_CALLS,
    calls_per_engine,
    latency_call_beside_throughput_work,
    over_best,
    over_best_of_random_cases,
    random_splits,
    split_of_group,
)

NAMED_COSTS = (
    Cost(),
    Cost(per_sequence_us=400),
    Cost(per_prefill_token_us=2, per_sequence_us=2_000),
    Cost(per_prefill_token_us=0.5, per_sequence_us=600),
)
RATES_GAP_US = (4_000, 8_000, 16_000)  # between calls
STEP_TOKENS = (16_384, 4_096, 2_048, 512)
ROOM_FOR_COLD = {"room": 9_000, "no room": 6_000}  # tokens of an engine, beside eight hot calls
STEP_US = 10_000  # of the flood: the least wait that is told apart from none


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many random six-call cases and groups (0: only named ones), seeds of the skewed fleets, calls of
    each, steps of the flood (10 ms each) and fleets for the shortlist."""

    num_cases: int = 24
    num_groups: int = 0
    num_seeds: int = 1
    num_skewed_calls: int = 2_400
    num_flood_steps: int = 1_200
    num_fleets: int = 6


QUICK = Sizes()
FULL = Sizes(num_cases=400, num_groups=400, num_seeds=5, num_flood_steps=6_000, num_fleets=30)


@dataclass(frozen=True, slots=True)
class Figure:
    """``target`` is the most that ``value`` may be, or the least."""

    name: str
    value: float
    target: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        """Whether the target is met."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def bound(self) -> str:
        """The target as it is written."""
        return f"{'>=' if self.at_least else '<='} {self.target:g}"


def run(quick: bool) -> dict[str, Any]:
    """Compute every figure and print it beside its target."""
    return measure(QUICK if quick else FULL)


def measure(sizes: Sizes) -> dict[str, Any]:
    """All figures at ``sizes``; ok: every target is met."""
    figures = [
        *_small_cases(sizes),
        *_known_answers(),
        *_groups(sizes),
        *_skewed(sizes),
        *_cold(sizes),
        _shortlist(sizes),
    ]
    return report(figures) | {"sizes": asdict(sizes)}


def report(figures: list[Figure]) -> dict[str, Any]:
    """Print ``figures``, and which of them miss their target."""
    print_table(
        "placements in simulated time",
        ("figure", "value", "target", "ok"),
        [(f.name, f"{f.value:.4g}", f.bound, "yes" if f.ok else "NO") for f in figures],
    )
    for figure in figures:
        if not figure.ok:
            print(f"MISSED  {figure.name}: {figure.value:.4g}, target {figure.bound}")
    return {
        "figures": [{"name": f.name, "value": float(f"{f.value:.4g}"), "target": f.bound} for f in figures],
        "checks": {figure.name: figure.ok for figure in figures},
        "ok": all(figure.ok for figure in figures),
    }


def _small_cases(sizes: Sizes) -> Iterator[Figure]:
    """The target is one of the mean; percentiles are told of a sample that is large enough to have some."""
    named = [over_best(costs, jobs) for costs in FLEETS.values() for jobs in SIX_CALLS.values()]
    name = "6 calls, 3 engines: mean end / the best"
    yield Figure(f"{name}, worst of {len(named)} named cases", max(named), 1.1)
    cases = over_best_of_random_cases(sizes.num_cases, seed=5)
    told = f"{len(cases)} random cases"
    if len(cases) >= 100:
        told += f" (95th percentile {np.percentile(cases, 95):.3f}, worst {max(cases):.3f})"
    yield Figure(f"{name}, mean of {told}", float(np.mean(cases)), 1.1)


def _known_answers() -> Iterator[Figure]:
    calls = calls_per_engine(4, 32)
    name = "32 equal calls, 4 idle engines"
    yield Figure(f"{name}: most on one", max(calls.values()), 8)
    yield Figure(f"{name}: least on one", min(calls[engine] for engine in range(4)), 8, at_least=True)
    (_, tokens), engine = latency_call_beside_throughput_work()
    name = f"{tokens:,} tokens or 2,000: latency-bound calls sent to the throughput work"
    yield Figure(name, int(engine != 0), 0)


def _groups(sizes: Sizes) -> Iterator[Figure]:
    """By the tokens of a step at most, which are those of engines on large to small GPUs and on CPUs."""
    name = "group with 7,000 tokens: split though no sooner"
    named = [split_of_group(cost, step_tokens) for cost in NAMED_COSTS for step_tokens in STEP_TOKENS]
    yield Figure(f"{name}, of {len(named)} named", sum(split.is_wrong for split in named), 0)
    for step_tokens in STEP_TOKENS if sizes.num_groups else ():
        splits = [split for split in random_splits(sizes.num_groups, 5, step_tokens) if split.is_split]
        worst = max(split.placed_us / split.together_us for split in splits)
        told = f"of {len(splits)}, {step_tokens:,} tokens a step (worst {worst:.2f}x)"
        yield Figure(f"{name}, {told}", sum(split.is_wrong for split in splits), 0)


def _skewed(sizes: Sizes) -> Iterator[Figure]:
    """The worst seed of each rate."""
    for gap_us in RATES_GAP_US:
        fleets = [CachingFleet(gap_us, seed) for seed in range(3, 3 + sizes.num_seeds)]
        for fleet in fleets:
            fleet.run(sizes.num_skewed_calls)
        name = f"Zipf(1.1), 16 engines, {1e6 / gap_us:g} calls/s"
        yield Figure(f"{name}: most loaded / mean", max(fleet.most_over_mean for fleet in fleets), 1.5)
        hits = min(fleet.hits_over_best_static for fleet in fleets)
        yield Figure(f"{name}: hits / best static", hits, 0.9, at_least=True)


def _cold(sizes: Sizes) -> Iterator[Figure]:
    for name, capacity in ROOM_FOR_COLD.items():
        waits, fair = (
            waits_of_cold_calls(sizes.num_flood_steps, fair=fair, capacity_tokens=capacity)
            for fair in (False, True)
        )
        for figure, of in (("mean", np.mean), ("longest", np.max)):
            ms, fair_ms = (float(of(some)) / 1_000 for some in (waits, fair))
            ratio = ms / max(fair_ms, STEP_US / 1_000)
            told = f"{ms:,.0f} ms, fair {fair_ms:,.0f}"
            yield Figure(f"cold call in a flood, {name}: {figure} wait / fair ({told})", ratio, 2)


def _shortlist(sizes: Sizes) -> Figure:
    ratios = [
        placed.score_us / best.score_us
        for seed in range(sizes.num_fleets)
        for best, placed in choices_among_many(seed)
        if placed is not None
    ]
    name = f"shortlist: score / a full scan's, worst of {len(ratios):,} in {sizes.num_fleets} fleets"
    return Figure(name, max(ratios), 1.05)
