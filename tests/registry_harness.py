"""An engine registry, who listens to it, and the engines' end of real DEALER sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from parrot import wire
from parrot.config import ManagerConfig
from parrot.manager.clock import now_s
from parrot.manager.engines import Engine, EngineRegistry

# None is lost unless a test says so: see `time_out`.
CONFIG = ManagerConfig(heartbeat_s=0.05, lost_after_s=600.0)


@dataclass
class Recorder:
    """EngineEvents that remembers what it was told."""

    refusal: str | None = None
    joined: list[Engine] = field(default_factory=list)
    lost: list[tuple[Engine, str]] = field(default_factory=list)
    replies: list[wire.Reply] = field(default_factory=list)
    paused: list[tuple[str, bool]] = field(default_factory=list)
    slowed: list[tuple[str, float]] = field(default_factory=list)
    repriced: list[wire.CostModel] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    num_heartbeats: int = 0

    def admits_engine(self, _: wire.Register) -> str | None:
        return self.refusal

    def engine_joined(self, engine: Engine) -> None:
        self.joined.append(engine)

    def engine_lost(self, engine: Engine, reason: str) -> None:
        self.lost.append((engine, reason))

    def engine_replied(self, _: Engine, replies: tuple[wire.Reply, ...]) -> None:
        self.replies.extend(replies)

    def engine_paused(self, engine: Engine, paused: bool) -> None:
        self.paused.append((engine.name, paused))

    def engine_slowed(self, engine: Engine, slowdown: float) -> None:
        self.slowed.append((engine.name, slowdown))

    def engine_repriced(self, engine: Engine) -> None:
        self.repriced.append(engine.cost)

    def frames_lost(self, engine: Engine) -> None:
        self.broken.append(engine.name)

    def heartbeat(self) -> None:
        self.num_heartbeats += 1


def stats(clock_us: int) -> wire.EngineStats:
    return wire.EngineStats(clock_us, *[0] * (len(wire.EngineStats.__struct_fields__) - 1))


def register(epoch: str, name: str = "engine-0", protocol: int = wire.PROTOCOL_VERSION) -> wire.Register:
    model = wire.ModelInfo("tiny", "abc", 100, 512, "float32", "cpu")
    cost = wire.CostModel(1.0, 1.0, 1.0, 0.1, 4096, 256)
    return wire.Register(protocol, name, epoch, 1, model, cost, 8)


class Peer:
    """The engine's end of the socket."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    async def send(self, message: wire.FromEngine) -> None:
        await self.socket.send(wire.encode(message))

    async def receive(self) -> wire.ToEngine:
        return wire.decode_to_engine(await asyncio.wait_for(self.socket.recv(), 60))


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not become true"
        await asyncio.sleep(0.005)


def time_out(registry: EngineRegistry, name: str) -> None:
    """This engine has been silent for too long, unless it is heard again before the next heartbeat."""
    for engine in registry.alive:
        if engine.name == name:
            engine.last_seen = now_s() - 1.5 * CONFIG.lost_after_s


def with_registry(
    scenario: Callable[[EngineRegistry, Recorder, Callable[[], Peer]], Awaitable[None]],
) -> None:
    async def run() -> None:
        registry = EngineRegistry(CONFIG)
        events = Recorder()
        registry.start(events)
        context = zmq.asyncio.Context()
        try:
            await scenario(registry, events, lambda: Peer(context, registry.address))
        finally:
            await registry.close()
            context.destroy(linger=0)

    asyncio.run(run())
