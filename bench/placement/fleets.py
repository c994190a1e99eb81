"""Simulated fleets over time: skewed prefixes and small caches, a tenant's flood, many unequal engines."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator

import numpy as np

from parrot._core import Candidate, Placement

from .driver import Cost, Driver, text


class CachingFleet:
    """Sixteen engines that keep the prefixes of twenty families each, least recently used first to go, under
    calls of 200 families, skewed by Zipf's law with exponent 1.1, that come one by one."""

    num_engines, num_cached, num_families, prefix_len, own, new = 16, 20, 200, 2_000, 60, 100

    def __init__(self, gap_us: int, seed: int = 3) -> None:
        self.gap_us = gap_us
        self.rng = np.random.default_rng(seed)
        self.weights = 1 / np.arange(1, self.num_families + 1) ** 1.1
        self.weights /= self.weights.sum()
        self.driver = Driver.with_engines([Cost()] * self.num_engines)
        self.prefixes = [text(family, self.prefix_len) for family in range(self.num_families)]
        self.caches: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(self.num_engines)]
        self.families: dict[int, int] = {}
        self.ends: list[tuple[int, int, int]] = []
        self.placed = Counter[int]()
        self.busy = np.zeros(self.num_engines)
        self.hits = 0

    def finish(self, call_id: int, engine_id: int, now: int) -> None:
        """A call ends and leaves its family's prefix in its engine's cache."""
        scheduler, kept = self.driver.scheduler, self.caches[engine_id]
        scheduler.finish(call_id, now_us=now, context_id=call_id + 1, num_tokens=self.prefix_len)
        family = self.families.pop(call_id)
        if family in kept:
            scheduler.forget_context(engine_id, kept.pop(family), 0)
        kept[family] = call_id + 1
        if len(kept) > self.num_cached:
            scheduler.forget_context(engine_id, kept.popitem(last=False)[1], 0)

    def run(self, num_calls: int) -> None:
        """Every call is placed at once; the first quarter fills the caches and is not counted."""
        cost, length = self.driver.costs[0], self.prefix_len
        for call_id in range(num_calls):
            now = self.gap_us * call_id
            while self.ends and self.ends[0][0] <= now:
                _, ended, engine_id = heapq.heappop(self.ends)
                self.finish(ended, engine_id, now)
            family = int(self.rng.choice(self.num_families, p=self.weights))
            self.families[call_id] = family
            prompt = np.concatenate([self.prefixes[family], text(1_000 + call_id, self.own)])
            cuts = [length, length + self.own]
            self.driver.submit(call_id, prompt, boundaries=cuts, now=now, new=self.new)
            (placement,) = self.driver.scheduler.schedule(now)
            engine_id = placement.engine_id
            batch = self.driver.load(engine_id)[0]
            uncached = length + self.own - placement.prefix_len
            took = cost.step_us(batch, uncached, 0) + self.new * cost.step_us(batch, 0, 0)
            heapq.heappush(self.ends, (now + int(took), call_id, engine_id))
            if call_id >= num_calls // 4:
                self.hits += placement.prefix_len >= length
                self.placed[engine_id] += 1
                self.busy += [self.driver.load(engine)[0] for engine in range(self.num_engines)]
        self.driver.scheduler.check_invariants()

    @property
    def most_over_mean(self) -> float:
        """Calls of the engine that got most over the mean, or calls in flight over time if that is more."""
        placed = max(self.placed.values()) * self.num_engines / self.placed.total()
        return max(placed, float(self.busy.max() / self.busy.mean()))

    @property
    def hits_over_best_static(self) -> float:
        """The hit rate over that of the best placement fixed in advance: of the families that all caches
        together hold, here every one of them."""
        held = min(self.num_engines * self.num_cached, self.num_families)
        return float(self.hits / self.placed.total() / self.weights[:held].sum())


def waits_of_cold_calls(
    num_steps: int = 1_200, *, fair: bool = False, capacity_tokens: int = 9_000
) -> list[int]:
    """Every 0.4 s a stranger's call comes to two engines that a tenant floods with calls of one prefix.

    Returns what the strangers waited in microseconds; those that wait at the end, what they have so far.
    ``fair``: tenants take turns by weight, and no prefix draws a call anywhere or counts as cached. A call of
    a stranger takes 2,550 tokens of an engine, eight of the others take 3,800."""
    cost = Cost(capacity_tokens=capacity_tokens, max_batch_size=8)
    driver = Driver.with_engines([cost] * 2, prefix_affinity=not fair)
    hot, cold = text(1, 3_000), 1_000_000
    running: list[tuple[int, int]] = []
    submitted: dict[int, int] = {}
    waits: list[int] = []
    now = 0
    for step in range(num_steps):
        now = 10_000 * step
        driver.submit(step, np.concatenate([hot, text(step, 50)]), boundaries=[3_000], now=now, tenant=1)
        if step % 40 == 39:
            submitted[cold + step] = now
            driver.submit(cold + step, text(cold + step, 2_500), now=now, tenant=2)
        while running and running[0][0] <= now:
            _, ended = running.pop(0)
            context = ended + 1 if ended < cold else 0
            driver.scheduler.finish(ended, now_us=now, context_id=context, num_tokens=3_100)
        for placement in driver.scheduler.schedule(now):
            running.append((now + 200_000, placement.call_id))
            if placement.call_id in submitted:
                waits.append(now - submitted.pop(placement.call_id))
    driver.scheduler.check_invariants()
    return waits + [now - since for since in submitted.values()]


def choices_among_many(seed: int) -> Iterator[tuple[Candidate, Placement | None]]:
    """Calls that come one by one to 17 to 200 unequal engines with prefixes: the best engine of a full scan,
    and where the call was placed, with the shortlist, at the same moment."""
    rng = np.random.default_rng(seed)
    driver = Driver.with_engines([_random_cost(rng) for _ in range(int(rng.integers(17, 200)))])
    heads = [text(50_000 + head, 600) for head in range(int(rng.integers(1, 12)))]
    running: list[int] = []
    now = 0
    for call_id in range(1, 500):
        now += int(rng.integers(6_000))
        while running and (len(running) > 8 * len(driver.costs) or rng.random() < 0.4):
            ended = running.pop(int(rng.integers(len(running))))
            context = ended if rng.random() < 0.7 else 0
            driver.scheduler.finish(ended, now_us=now, context_id=context, num_tokens=10_000)
        driver.schedule(now)  # so that explain() is of this moment
        prompt, cuts = text(call_id, int(rng.integers(1, 800))), []
        if rng.random() < 0.7:
            prompt = np.concatenate([heads[int(rng.integers(len(heads)))], prompt])
            cuts = [200, 600, len(prompt)]
        latency = bool(rng.random() < 0.2)
        new = int(rng.integers(1, 300))
        driver.submit(call_id, prompt, boundaries=cuts, now=now, latency=latency, new=new)
        best = driver.scheduler.explain(call_id)[0]
        placed = driver.schedule(now).get(call_id)
        yield best, placed
        if placed is None:
            driver.scheduler.cancel(call_id)
        else:
            running.append(call_id)


def _random_cost(rng: np.random.Generator) -> Cost:
    """An engine of a kind of its own."""
    scale = rng.uniform(0.4, 2.5, 4)
    return Cost(
        base_us=8_000 * scale[0],
        per_sequence_us=200 * scale[1],
        per_prefill_token_us=25 * scale[2],
        per_kv_token_us=0.5 * scale[3],
        capacity_tokens=int(rng.integers(4_000, 40_000)),
        max_batch_size=int(rng.integers(4, 24)),
    )
