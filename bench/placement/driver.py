"""What benchmarks and tests tell a scheduler in few words, and a step-by-step engine as the judge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from parrot._core import Placement, Scheduler

Ids = npt.NDArray[np.int32]
KEY = bytes(range(16))


@dataclass(frozen=True)
class Cost:
    """A cost model about that of a 7B model on a large GPU, unless told otherwise."""

    base_us: float = 8_000.0
    per_sequence_us: float = 40.0
    per_prefill_token_us: float = 25.0
    per_kv_token_us: float = 0.1
    capacity_tokens: int = 64_000
    max_batch_size: int = 64

    def of_steps(self) -> dict[str, float]:
        """What may change while the engine lives."""
        return {name: value for name, value in vars(self).items() if name.endswith("_us")}

    def step_us(self, batch: int, prefill: int, kv_tokens: int) -> float:
        per_token = self.per_prefill_token_us * prefill + self.per_kv_token_us * kv_tokens
        return self.base_us + self.per_sequence_us * batch + per_token


def text(seed: int, length: int) -> Ids:
    """Token ids that differ from those of any other seed."""
    return np.random.default_rng(seed).integers(0, 30_000, length, dtype=np.int32)


@dataclass
class Driver:
    """A scheduler with engines, and submit with defaults."""

    scheduler: Scheduler
    costs: dict[int, Cost] = field(default_factory=dict)

    @classmethod
    def with_engines(cls, costs: Sequence[Cost], **options: object) -> Driver:
        driver = cls(Scheduler(hash_key=KEY, **options))  # type: ignore[arg-type]
        for engine_id, cost in enumerate(costs):
            driver.add_engine(engine_id, cost)
        return driver

    def add_engine(self, engine_id: int, cost: Cost, model: int = 0) -> None:
        self.scheduler.add_engine(engine_id, **vars(cost), model=model)
        self.costs[engine_id] = cost

    def submit(
        self,
        call_id: int,
        prompt: Ids | None = None,
        *,
        boundaries: Iterable[int] | None = None,
        app: int | None = None,
        arrival: int | None = None,
        now: int = 0,
        domain: int = 0,
        tenant: int | None = None,
        public_len: int = 0,
        model: int = 0,
        latency: bool = False,
        group: int = -1,
        depth: int = 0,
        new: int = 50,
        start_by_us: int | None = None,
        per_token_us: float = 0.0,
        app_ran_us: int | None = None,
    ) -> None:
        """A call of 200 unshared tokens unless told otherwise, cut at its end."""
        token_ids = text(1_000_000 + call_id, 200) if prompt is None else prompt
        cuts = [len(token_ids)] if boundaries is None else list(boundaries)
        self.scheduler.submit(
            call_id,
            app_id=call_id if app is None else app,
            app_arrival_us=now if arrival is None else arrival,
            now_us=now,
            domain=domain,
            latency=latency,
            group_id=group,
            depth=depth,
            token_ids=token_ids,
            boundaries=np.array(cuts, dtype=np.int32),
            max_new_tokens=new,
            model=model,
            tenant=tenant,
            start_by_us=start_by_us,
            per_token_us=per_token_us,
            public_len=public_len,
            app_ran_us=app_ran_us,
        )

    def schedule(self, now: int = 0) -> dict[int, Placement]:
        """The placements by call, in the order in which they were made."""
        placements = {placement.call_id: placement for placement in self.scheduler.schedule(now)}
        self.scheduler.check_invariants()
        return placements

    def engines_of(self, now: int = 0) -> dict[int, int]:
        return {call_id: placement.engine_id for call_id, placement in self.schedule(now).items()}

    def finish(self, call_id: int, *, now: int = 0, context: int = 0, tokens: int = 0) -> None:
        self.scheduler.finish(call_id, now_us=now, context_id=context, num_tokens=tokens)
        self.scheduler.check_invariants()

    def load(self, engine_id: int) -> tuple[int, int]:
        return self.scheduler.engine_load(engine_id)


@dataclass(frozen=True)
class Job:
    """A call as the simulated engine sees it: ``shared`` tokens that its whole family has, then own ones."""

    family: int
    shared: int
    own: int
    new: int

    def prompt(self, seed: int) -> Ids:
        return np.concatenate([text(self.family, self.shared), text(10_000 + seed, self.own)])


def finish_times(
    cost: Cost, jobs: Sequence[Job], cached: frozenset[int] = frozenset(), step_tokens: int = 512
) -> list[float]:
    """Run jobs that arrive together on one engine: prefill in order, ``step_tokens`` a step, decode of all
    others in the same step, each shared prefix computed, kept and loaded once. Returns their ends in
    microseconds; of a family in ``cached`` the prefix is there."""
    known = set(cached)
    to_prefill = []
    for job in jobs:
        to_prefill.append(job.own + (0 if job.family in known else job.shared))
        known.add(job.family)
    generated = [0] * len(jobs)
    done = [0.0] * len(jobs)
    clock = 0.0
    while running := [i for i, job in enumerate(jobs) if generated[i] < job.new]:
        budget = step_tokens
        started = [i for i in running if to_prefill[i] == 0]
        for i in running:
            chunk = min(budget, to_prefill[i])
            to_prefill[i] -= chunk
            budget -= chunk
        families = {jobs[i].family: jobs[i].shared for i in started}
        kv_tokens = sum(families.values()) + sum(jobs[i].own + generated[i] for i in started)
        clock += cost.step_us(len(running), step_tokens - budget, kv_tokens)
        for i in running:
            if to_prefill[i] == 0:
                generated[i] += 1
                done[i] = clock
    return done
