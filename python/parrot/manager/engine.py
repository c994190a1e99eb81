"""An engine as the manager knows it, and what the executor is told of engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from .. import wire
from ..api import EngineView
from .clock import ClockOffset, now_s
from .frames import FrameOrder
from .health import Progress, Slowdown

_TYPICAL = (16, 0, 16 * 512)  # batch, prefill and KV tokens of a step by which paces are compared
_TARGETS_MS = (20, 40, 80)
_LENGTH = 1024  # tokens of each sequence beside which a target is kept

EngineState = Literal["ready", "silent", "draining", "stalled", "lost", "left"]


@dataclass(slots=True, eq=False)
class Engine:
    """One life of one engine process. ``engine_id`` is unique for the life of the manager."""

    engine_id: int
    identity: bytes  # routing id of its DEALER
    registration: wire.Register
    manager_id: str  # what its heartbeats say
    last_seen: float  # clock.now_s()
    clock: ClockOffset = field(default_factory=ClockOffset)
    frames: FrameOrder = field(default_factory=FrameOrder)
    stats: wire.EngineStats | None = None
    cost: wire.CostModel = field(init=False)  # of now
    num_cost_changes: int = 0
    slowdown: Slowdown = field(default_factory=Slowdown)
    progress: Progress = field(default_factory=lambda: Progress(now_s()))
    state: EngineState = "ready"
    num_dispatched: int = 0  # calls sent to it that have not ended
    num_sent: int = 0  # frames, pings excluded
    num_missing: int = 0  # of those, as far as the engine has said

    def __post_init__(self) -> None:
        self.cost = self.registration.cost_model

    @property
    def name(self) -> str:
        """The name it registered under."""
        return self.registration.name

    @property
    def alive(self) -> bool:
        """Its calls may still be answered."""
        return self.state in ("ready", "silent", "draining")

    def reprice(self, cost: wire.StepCost) -> bool:
        """Its steps have come to take this; whether that is news."""
        fresh = msgspec.structs.replace(self.registration.cost_model, **msgspec.structs.asdict(cost))
        if fresh == self.cost:
            return False
        self.cost = fresh
        self.num_cost_changes += 1
        at_start_us, now_us = (model.step_us(*_TYPICAL) for model in (self.registration.cost_model, fresh))
        self.slowdown.repriced(min(1.0, at_start_us / now_us) if now_us > 0 else 1.0, self.stats)
        return True

    def view(self) -> EngineView:
        """This engine as the API shows it."""
        info = self.registration
        return EngineView(
            name=info.name,
            alive=self.alive,
            state=self.state,
            pid=info.pid,
            model=info.model.name,
            device=info.model.device,
            dtype=info.model.dtype,
            cost_model=msgspec.structs.asdict(self.cost),
            num_cost_changes=self.num_cost_changes,
            capacity_tokens_at={
                f"{target_ms} ms": self.cost.tokens_within(target_ms * 1e3, _LENGTH)
                for target_ms in _TARGETS_MS
            },
            stats=msgspec.structs.asdict(self.stats) if self.stats is not None else {},
            num_dispatched=self.num_dispatched,
            slowdown=round(self.slowdown.factor, 2),
        )


class EngineEvents(Protocol):
    """What the registry tells the executor; called on the loop, never concurrently."""

    def admits_engine(self, registration: wire.Register) -> str | None:
        """None to take the engine in, else why not."""

    def engine_joined(self, engine: Engine) -> None:
        """The engine can be sent calls. Raises if it is not to be taken in; nothing is known of it then."""

    def engine_lost(self, engine: Engine, reason: str) -> None:
        """The engine is gone; no reply of it will follow."""

    def engine_replied(self, engine: Engine, replies: tuple[wire.Reply, ...]) -> None:
        """All replies of one step."""

    def engine_paused(self, engine: Engine, paused: bool) -> None:
        """It should be sent no more calls for now; or again."""

    def engine_slowed(self, engine: Engine, slowdown: float) -> None:
        """Its steps take so many times what its cost model says."""

    def engine_repriced(self, engine: Engine) -> None:
        """Its steps have come to take what ``engine.cost`` says."""

    def frames_lost(self, engine: Engine) -> None:
        """Calls never reached it, or replies never came: what it has now is to run again."""

    def heartbeat(self) -> None:
        """Another heartbeat has passed."""
