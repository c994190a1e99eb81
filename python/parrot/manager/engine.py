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

EngineState = Literal["ready", "silent", "draining", "stalled", "lost"]


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
    slowdown: Slowdown = field(default_factory=Slowdown)
    progress: Progress = field(default_factory=lambda: Progress(now_s()))
    state: EngineState = "ready"
    num_dispatched: int = 0  # calls sent to it that have not ended
    num_sent: int = 0  # frames, pings excluded
    num_missing: int = 0  # of those, as far as the engine has said

    @property
    def name(self) -> str:
        """The name it registered under."""
        return self.registration.name

    @property
    def alive(self) -> bool:
        """Its calls may still be answered."""
        return self.state in ("ready", "silent", "draining")

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
            cost_model=msgspec.structs.asdict(info.cost_model),
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

    def frames_lost(self, engine: Engine) -> None:
        """Calls never reached it, or replies never came: what it has now is to run again."""

    def heartbeat(self) -> None:
        """Another heartbeat has passed."""
