"""Cases so small that every placement can be tried, or the right one is known."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from parrot.wire import StepCost

from .driver import Cost, Driver, Job, finish_times, text

SMALL = Cost(base_us=4_000, per_sequence_us=1_500, per_prefill_token_us=40, per_kv_token_us=1.0)
SMALLER = Cost(base_us=8_000, per_sequence_us=3_000, per_prefill_token_us=80, per_kv_token_us=2.0)
FLEETS = {"equal": [SMALL] * 3, "one slower": [SMALL, SMALL, SMALLER]}
SIX_CALLS = {
    "alike": [Job(family, 0, 300, 20) for family in range(6)],
    "long and short": [Job(family, 0, 100 + 150 * family, 8 + 6 * family) for family in range(6)],
    "pairs that share": [Job(family // 2, 600, 60, 16) for family in range(6)],
    "all share a long prefix": [Job(0, 2_000, 40, 16) for _ in range(6)],
    "a sharing group and strangers": [Job(0, 1_500, 30, 12)] * 3 + [Job(i, 0, 400, 24) for i in range(1, 4)],
    "mostly decode": [Job(family, 0, 40, 30 + 5 * family) for family in range(6)],
}
GROUP = [Job(0, 7_000, 20, 50)] * 8  # a task group with a prefix of 7,000 tokens


def random_jobs(rng: np.random.Generator) -> list[Job]:
    """Six calls of up to four families, whose shared prefixes are of any length or none."""
    shared = rng.choice([0, 200, 800, 2_000], 4)
    families = rng.integers(0, 4, 6)
    return [
        Job(int(family), int(shared[family]), int(rng.integers(20, 500)), int(rng.integers(4, 48)))
        for family in families
    ]


def over_best(costs: Sequence[Cost], jobs: Sequence[Job], *, group: bool = False) -> float:
    """The mean end of ``jobs`` where the scheduler places them, over that of the best placement; of a
    task group the last end, over the earliest possible."""

    def figure(ends: list[float]) -> float:
        return max(ends) if group else sum(ends) / len(ends)

    figures = {engines: figure(ends) for engines, ends in _ends_of_all(costs, jobs).items()}
    return figures[_placed(costs, jobs, group=0 if group else -1)] / min(figures.values())


def over_best_of_random_cases(count: int, seed: int) -> list[float]:
    """``over_best`` of ``count`` random cases, on each of the fleets in turn."""
    rng = np.random.default_rng(seed)
    fleets = itertools.cycle(FLEETS.values())
    return [over_best(next(fleets), random_jobs(rng)) for _ in range(count)]


def _ends_of_all(costs: Sequence[Cost], jobs: Sequence[Job]) -> dict[tuple[int, ...], list[float]]:
    """The ends under each placement; what one engine does with a subset is simulated once."""

    @cache
    def ends_of(engine: int, part: tuple[int, ...]) -> list[float]:
        return finish_times(costs[engine], [jobs[i] for i in part])

    ends = {}
    for engines in itertools.product(range(len(costs)), repeat=len(jobs)):
        parts = [tuple(i for i, at in enumerate(engines) if at == engine) for engine in range(len(costs))]
        ends[engines] = [end for engine, part in enumerate(parts) for end in ends_of(engine, part)]
    return ends


def _placed(costs: Sequence[Cost], jobs: Sequence[Job], *, group: int) -> tuple[int, ...]:
    driver = Driver.with_engines(costs)
    for call_id, job in enumerate(jobs):
        cuts = sorted({job.shared, job.shared + job.own} - {0})
        driver.submit(call_id, job.prompt(call_id), boundaries=cuts, app=1, group=group, new=job.new)
    engines = driver.engines_of()
    return tuple(engines[call_id] for call_id in range(len(jobs)))


@dataclass(frozen=True, slots=True)
class Split:
    """When ``GROUP`` ends, in microseconds: all on the engine that has its prefix, in the best two parts of
    which the other computes the prefix first, and as it was placed."""

    together_us: float
    best_apart_us: float
    placed_us: float
    is_split: bool

    @property
    def is_wrong(self) -> bool:
        """It was split, and on one engine it would have ended no later."""
        return self.is_split and self.placed_us >= self.together_us


def split_of_group(cost: Cost, step_tokens: int) -> Split:
    """What the scheduler does with ``GROUP`` on two idle engines of which one has the prefix, if a step
    takes ``step_tokens`` of prompts at most."""
    driver = Driver.with_engines([_as_told(cost, step_tokens)] * 2)
    driver.submit(99, text(0, 7_000))
    home = driver.engines_of()[99]
    driver.finish(99, context=1, tokens=7_000)
    for call_id, job in enumerate(GROUP):
        driver.submit(call_id, job.prompt(call_id), boundaries=[7_000, 7_020], app=1, group=0)
    num_home = Counter(driver.engines_of().values())[home]

    def end_us(num_home: int) -> float:
        at_home = finish_times(cost, GROUP[:num_home], frozenset({0}), step_tokens)
        return max(at_home + finish_times(cost, GROUP[num_home:], frozenset(), step_tokens))

    is_split = driver.scheduler.counters()["splits"] == 1
    apart = min(end_us(count) for count in range(1, len(GROUP)))
    return Split(end_us(len(GROUP)), apart, end_us(num_home), is_split)


def _as_told(cost: Cost, step_tokens: int) -> Cost:
    """As the manager tells the scheduler, which knows no steps of a prompt."""
    step = StepCost(cost.base_us, cost.per_sequence_us, cost.per_prefill_token_us, cost.per_kv_token_us)
    return replace(cost, per_prefill_token_us=step.prompt_token_us(step_tokens))


def random_splits(count: int, seed: int, step_tokens: int) -> list[Split]:
    """On engines of which a prompt's token and a sequence cost anything from next to nothing to a lot."""
    rng = np.random.default_rng(seed)
    return [split_of_group(_random_cost(rng), step_tokens) for _ in range(count)]


def _random_cost(rng: np.random.Generator) -> Cost:
    prefill, sequence = np.exp(rng.uniform(np.log([0.5, 40]), np.log([50, 4_000])))
    return Cost(per_prefill_token_us=float(prefill), per_sequence_us=float(sequence))


def calls_per_engine(num_engines: int, num_calls: int, *, group: int = -1) -> Counter[int]:
    """How many of equal throughput calls that share nothing each of some idle engines gets."""
    driver = Driver.with_engines([Cost()] * num_engines)
    for call_id in range(num_calls):
        driver.submit(call_id, app=1, group=group)
    return Counter(driver.engines_of().values())


def latency_call_beside_throughput_work() -> tuple[tuple[int, int], int]:
    """The paper's example: 64,000 tokens of throughput work would have to make room down to 2,000.

    Returns how many calls and tokens the engine of that work holds, and the engine that a latency-bound call
    then goes to. Engine 0 has another such call and is constrained already."""
    driver = Driver.with_engines([Cost(), Cost()], latency_capacity_tokens=2_000)
    driver.submit(100, text(100, 950), latency=True)
    driver.schedule()
    for call_id in range(32):
        driver.submit(call_id, text(call_id, 1_950))
    driver.schedule()
    load = driver.load(1)
    driver.finish(31)  # so that there is room on both
    driver.submit(101, text(101, 450), latency=True)
    return load, driver.engines_of()[101]
