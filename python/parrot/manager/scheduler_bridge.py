"""The executor's view of the native scheduler: runs and engines instead of numbers."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, cast

from .._core import Candidate, Placement, QueueFull, Scheduler
from ..config import SchedulerConfig
from ..errors import Overloaded
from ..wire import CallId, ContextId, StepCost
from .clock import now_us
from .engines import Engine
from .event_log import RecordedScheduler
from .runs import Run, num_new_tokens

_GROUPS_PER_APP = 1 << 24


class SchedulerBridge:
    """Feeds events to Algorithm 1 with the manager's clock."""

    def __init__(self, config: SchedulerConfig) -> None:
        options: dict[str, Any] = {
            "group_placement": config.group_placement,
            "prefix_affinity": config.prefix_affinity,
            "splitting": config.splitting,
            "replication": config.replication,
            "objective_aware": config.objective_aware,
            "application_order": config.application_order,
            "tenant_shares": config.tenant_shares,
            "aging": config.aging,
            "latency_capacity_tokens": config.latency_capacity_tokens,
            "aging_us": round(config.aging_s * 1e6),
            "max_queued": config.max_queued,
            "max_queued_per_tenant": config.max_queued_per_tenant,
        }
        self._scheduler = _scheduler(config.record, options)

    def add_engine(self, engine: Engine) -> None:
        """The engine can be given runs."""
        cost, max_batch_size = engine.registration.cost_model, engine.registration.max_batch_size
        self._scheduler.add_engine(
            engine.engine_id,
            capacity_tokens=cost.capacity_tokens,
            max_batch_size=max_batch_size,
            model=0,
            **_cost_of(engine, cost),
        )

    def remove_engine(self, engine: Engine) -> list[CallId]:
        """The engine is gone; returns the runs that it had."""
        return [CallId(run_id) for run_id in self._scheduler.remove_engine(engine.engine_id)]

    def set_tenant_weight(self, tenant: int, weight: float) -> None:
        """A tenant's share of the work placed while several have calls queued; 1 unless told."""
        self._scheduler.set_tenant_weight(tenant, weight)

    def pause(self, engine: Engine, paused: bool) -> None:
        """The engine is given no more runs; or again."""
        self._scheduler.set_paused(engine.engine_id, paused)

    def set_slowdown(self, engine: Engine, slowdown: float) -> None:
        """The engine's steps take so many times what its cost model says."""
        self._scheduler.set_slowdown(engine.engine_id, slowdown)

    def set_cost(self, engine: Engine) -> None:
        """The engine's steps have come to take what its cost model of now says."""
        self._scheduler.set_cost(engine.engine_id, **_cost_of(engine, engine.cost))

    def submit(self, run: Run, num_steps: int) -> None:
        """Queue a run of the next ``num_steps`` steps of its call; raises :class:`Overloaded`."""
        call = run.call
        steps = call.steps[call.next_step : call.next_step + num_steps]
        now = now_us()
        try:
            self._scheduler.submit(
                run.run_id,
                app_id=run.application.number,
                app_arrival_us=run.application.arrival_us,
                app_ran_us=run.application.ran_us(now),
                now_us=now,
                domain=call.domain,
                latency=call.objective == "LATENCY",
                group_id=_group_id(run),
                depth=call.depth or 0,
                token_ids=run.prompt.first,
                boundaries=run.prompt.boundaries,
                public_len=run.prompt.public_len,
                max_new_tokens=num_new_tokens(steps) + sum(map(len, run.prompt.later)),
                start_by_us=call.targets.start_by_us,
                per_token_us=call.targets.per_token_us or 0.0,
            )
        except QueueFull as error:
            raise Overloaded(f"call {call.name}: {error}; try again later") from None

    def update_objective(self, run: Run) -> None:
        """The call's label changed."""
        self._scheduler.set_objective(
            run.run_id,
            latency=run.call.objective == "LATENCY",
            group_id=_group_id(run),
            depth=run.call.depth or 0,
            start_by_us=run.call.targets.start_by_us,
            per_token_us=run.call.targets.per_token_us or 0.0,
        )

    def schedule(self) -> list[Placement]:
        """Place what can be placed now."""
        return self._scheduler.schedule(now_us())

    def finish(self, run: Run, num_tokens: int) -> None:
        """The run left its engine and its context stayed there, ``num_tokens`` long."""
        self._scheduler.finish(run.run_id, now_us=now_us(), context_id=run.context_id, num_tokens=num_tokens)

    def cancel(self, run: Run) -> None:
        """The run is queued or with an engine no more, and left no context."""
        self._scheduler.cancel(run.run_id)

    def candidates(self, run: Run) -> list[Candidate]:
        """Where a run that is not queued would be best off, best first."""
        call = run.call
        return self._scheduler.candidates(
            now_us=now_us(),
            domain=call.domain,
            latency=call.objective == "LATENCY",
            token_ids=run.prompt.first,
            boundaries=run.prompt.boundaries,
            public_len=run.prompt.public_len,
            max_new_tokens=num_new_tokens(call.steps[:1]),
        )

    def add_context(self, engine: Engine, run: Run) -> None:
        """The engine computes the run's prompt ahead of the calls that begin with it."""
        self._scheduler.add_context(
            engine.engine_id,
            run.context_id,
            domain=run.call.domain,
            token_ids=run.prompt.first,
            boundaries=run.prompt.boundaries,
            public_len=run.prompt.public_len,
        )

    def forget_context(self, engine_id: int, context_id: ContextId, remaining: int) -> None:
        """Of this context, ``remaining`` tokens are left on its engine."""
        self._scheduler.forget_context(engine_id, context_id, remaining)

    @property
    def num_queued(self) -> int:
        """Runs that wait for an engine."""
        return self._scheduler.num_queued

    def counters(self) -> dict[str, int]:
        """Decisions by reason."""
        return self._scheduler.counters()


def _scheduler(record: Path | None, options: dict[str, Any]) -> Scheduler:
    hash_key = secrets.token_bytes(16)
    if record is None:
        return Scheduler(hash_key=hash_key, **options)
    log = record.open("wb", buffering=0)  # whole up to the last event, however the process ends
    return cast(Scheduler, RecordedScheduler(log, hash_key=hash_key, **options))


def _cost_of(engine: Engine, cost: StepCost) -> dict[str, float]:
    """As the scheduler takes it, which knows no steps of a prompt: its tokens share what theirs take."""
    return {
        "base_us": cost.base_us,
        "per_sequence_us": cost.per_sequence_us,
        "per_prefill_token_us": cost.prompt_token_us(engine.registration.max_batch_tokens),
        "per_kv_token_us": cost.per_kv_token_us,
    }


def _group_id(run: Run) -> int:
    group = run.call.task_group
    return -1 if group is None else run.application.number * _GROUPS_PER_APP + group
