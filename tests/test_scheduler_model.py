"""Random events in the scheduler against a model of what it knows, kept in dicts."""

from __future__ import annotations

import numpy as np
from bench.placement.driver import Cost, Driver
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

GRID = 2  # every prompt of the model is cut at each multiple, so that sharing can be counted by hand


def held_tokens(prompts: list[tuple[tuple[int, ...], int, int]]) -> int:
    """Tokens of (prompt, domain, new tokens) with each prefix on the grid counted once."""
    held = set()
    own = 0
    for prompt, domain, new in prompts:
        last = len(prompt) // GRID * GRID
        held |= {(domain, prompt[:end]) for end in range(GRID, last + 1, GRID)}
        own += len(prompt) - last + new
    return GRID * len(held) + own


class SchedulerAgainstDict(RuleBasedStateMachine):
    """Each call is exactly one of queued, in flight and gone, and each engine's load is that of its calls."""

    constant_hash = False

    @initialize(
        group_placement=st.booleans(),
        prefix_affinity=st.booleans(),
        splitting=st.booleans(),
        replication=st.booleans(),
        objective_aware=st.booleans(),
        application_order=st.booleans(),
    )
    def start(self, **switches: bool) -> None:
        self.driver = Driver.with_engines(
            [], latency_capacity_tokens=30, aging_us=50, constant_hash=self.constant_hash, **switches
        )
        self.now = 0
        self.next_id = 1
        self.prompts: dict[int, tuple[tuple[int, ...], int, int]] = {}
        self.queued: set[int] = set()
        self.in_flight: dict[int, int] = {}
        self.contexts: dict[int, int] = {}

    @rule(batch=st.integers(1, 4), capacity=st.integers(10, 60))
    def add_engine(self, batch: int, capacity: int) -> None:
        if len(self.driver.costs) < 4:
            self.driver.add_engine(self.next_id, Cost(capacity_tokens=capacity, max_batch_size=batch))
            self.next_id += 1

    @precondition(lambda self: self.driver.costs)
    @rule(data=st.data())
    def remove_engine(self, data: st.DataObject) -> None:
        engine_id = data.draw(st.sampled_from(sorted(self.driver.costs)))
        lost = self.driver.scheduler.remove_engine(engine_id)
        assert lost == sorted(call_id for call_id, engine in self.in_flight.items() if engine == engine_id)
        for call_id in lost:
            del self.in_flight[call_id]
        self.contexts = {context: engine for context, engine in self.contexts.items() if engine != engine_id}
        del self.driver.costs[engine_id]

    @rule(
        tokens=st.lists(st.integers(0, 1), max_size=8),
        new=st.integers(0, 12),
        latency=st.booleans(),
        group=st.integers(-1, 1),
        app=st.integers(0, 2),
        domain=st.integers(0, 1),
        depth=st.integers(0, 2),
        per_token_us=st.sampled_from([0.0, 1.0, 8_045.0, 8_100.0, 86.4e9]),
    )
    def submit(
        self,
        tokens: list[int],
        new: int,
        latency: bool,
        group: int,
        app: int,
        domain: int,
        depth: int,
        per_token_us: float,
    ) -> None:
        call_id = self.next_id
        self.next_id += 1
        self.driver.submit(
            call_id,
            np.array(tokens, dtype=np.int32),
            boundaries=range(GRID, len(tokens) + 1, GRID),
            app=app,
            arrival=app,
            now=self.now,
            domain=domain,
            latency=latency,
            group=group,
            depth=depth,
            new=new,
            per_token_us=per_token_us,
        )
        self.prompts[call_id] = (tuple(tokens), domain, new)
        self.queued.add(call_id)

    @rule(passed=st.integers(0, 40))
    def schedule(self, passed: int) -> None:
        self.now += passed
        placed = self.driver.schedule(self.now)
        for call_id, placement in placed.items():
            self.queued.remove(call_id)
            self.in_flight[call_id] = placement.engine_id
            assert placement.prefix_len <= len(self.prompts[call_id][0])
            parent = placement.parent_context_id
            assert parent == 0 or self.contexts[parent] == placement.engine_id
        for engine_id in {placement.engine_id for placement in placed.values()}:
            num_calls, tokens = self.driver.load(engine_id)
            cost = self.driver.costs[engine_id]
            assert num_calls <= cost.max_batch_size
            assert num_calls == 1 or tokens <= cost.capacity_tokens
        if self.queued:
            assert all(self.driver.load(engine_id)[0] > 0 for engine_id in self.driver.costs)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), keeps_context=st.booleans(), tokens=st.integers(0, 10))
    def finish(self, data: st.DataObject, keeps_context: bool, tokens: int) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.in_flight)))
        context = self.next_id if keeps_context else 0
        self.next_id += 1
        self.driver.finish(call_id, now=self.now, context=context, tokens=tokens)
        engine_id = self.in_flight.pop(call_id)
        if context:
            self.contexts[context] = engine_id

    @precondition(lambda self: self.queued or self.in_flight)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.queued | set(self.in_flight))))
        assert self.driver.scheduler.cancel(call_id)
        assert not self.driver.scheduler.cancel(call_id)
        self.queued.discard(call_id)
        self.in_flight.pop(call_id, None)

    @precondition(lambda self: self.queued or self.in_flight)
    @rule(
        data=st.data(),
        latency=st.booleans(),
        group=st.integers(-1, 1),
        depth=st.integers(0, 2),
        per_token_us=st.sampled_from([0.0, 8_045.0]),
    )
    def set_objective(
        self, data: st.DataObject, latency: bool, group: int, depth: int, per_token_us: float
    ) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.queued | set(self.in_flight))))
        self.driver.scheduler.set_objective(
            call_id, latency=latency, group_id=group, depth=depth, per_token_us=per_token_us
        )

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), remaining=st.integers(0, 8))
    def forget_context(self, data: st.DataObject, remaining: int) -> None:
        context = data.draw(st.sampled_from(sorted(self.contexts)))
        self.driver.scheduler.forget_context(self.contexts[context], context, remaining)
        if remaining == 0:
            del self.contexts[context]

    @precondition(lambda self: self.queued or self.in_flight)
    @rule(data=st.data())
    def explain(self, data: st.DataObject) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.queued | set(self.in_flight))))
        candidates = self.driver.scheduler.explain(call_id)
        if call_id in self.in_flight:
            assert self.in_flight[call_id] in {candidate.engine_id for candidate in candidates}

    @invariant()
    def is_conserved(self) -> None:
        scheduler = self.driver.scheduler
        scheduler.check_invariants()
        assert (scheduler.num_queued, scheduler.num_in_flight) == (len(self.queued), len(self.in_flight))
        for engine_id in self.driver.costs:
            calls = [call_id for call_id, engine in self.in_flight.items() if engine == engine_id]
            tokens = held_tokens([self.prompts[call_id] for call_id in calls])
            assert self.driver.load(engine_id) == (len(calls), tokens)


class CollidingSchedulerAgainstDict(SchedulerAgainstDict):
    constant_hash = True


BOUNDED = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerAgainstDict = SchedulerAgainstDict.TestCase
TestSchedulerAgainstDict.settings = BOUNDED
TestCollidingSchedulerAgainstDict = CollidingSchedulerAgainstDict.TestCase
TestCollidingSchedulerAgainstDict.settings = settings(BOUNDED, max_examples=30)
