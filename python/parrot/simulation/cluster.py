"""A whole service in one process: the manager as it is, without HTTP, and its engines, simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from .. import wire
from ..config import ManagerConfig
from ..engine.made_up import MadeUpText
from ..manager.engine_socket import Receiver
from ..manager.engines import EngineRegistry
from ..manager.executor import Executor
from ..manager.key_file import load_keys
from ..manager.service import Service
from ..tokenizer import Tokenizer
from .engine import EngineActor, EngineSpec
from .loop import SimulatedLoop


class SimulatedWire:
    """Implements :class:`~parrot.manager.engine_socket.EngineSocket`: frames as they are on the real wire,
    which arrive at once."""

    address = local_address = "simulated"

    def __init__(self) -> None:
        self._receive: Receiver | None = None
        self._engines: dict[bytes, EngineActor] = {}

    def connect(self, engine: EngineActor) -> None:
        """From now on the engine gets what is sent to its name."""
        self._engines[engine.name.encode()] = engine

    def from_engine(self, name: str, message: wire.FromEngine) -> None:
        """An engine sends."""
        if self._receive is None:
            raise RuntimeError(f"engine {name} sends before the manager has started")
        asyncio.get_running_loop().call_soon(self._receive, [name.encode(), wire.encode(message)])

    def send(self, identity: bytes, frames: Sequence[bytes]) -> bool:
        """See :class:`~parrot.manager.engine_socket.EngineSocket`."""
        engine = self._engines.get(identity)
        if engine is None:
            return False
        for frame in frames:
            engine.deliver(wire.decode_to_engine(frame))
        return True

    def start(self, receive: Receiver) -> None:
        """See :class:`~parrot.manager.engine_socket.EngineSocket`."""
        self._receive = receive

    def take_blocked_s(self) -> float:
        """See :class:`~parrot.manager.engine_socket.EngineSocket`."""
        return 0.0

    def close(self) -> None:
        """See :class:`~parrot.manager.engine_socket.EngineSocket`."""
        self._engines.clear()


class Cluster:
    """``service`` is what the HTTP routes call; requests go to it directly."""

    def __init__(
        self,
        loop: SimulatedLoop,
        config: ManagerConfig,
        tokenizer: Tokenizer,
        engines: Sequence[EngineSpec],
        text: MadeUpText | None = None,
    ) -> None:
        self.loop = loop
        self.tokenizer = tokenizer
        self._wire = SimulatedWire()
        self.registry = EngineRegistry(config, self._wire)
        self.executor = Executor(config, tokenizer, self.registry, load_keys(config.api_keys))
        self.service = Service(self.executor)
        text = text or MadeUpText(tokenizer)
        self.engines = [self._engine(f"engine-{i}", spec, text) for i, spec in enumerate(engines)]

    def _engine(self, name: str, spec: EngineSpec, text: MadeUpText) -> EngineActor:
        def send(message: wire.FromEngine) -> None:
            self._wire.from_engine(name, message)

        actor = EngineActor(name, spec, self.tokenizer, text, self.loop, send)
        self._wire.connect(actor)
        return actor

    async def start(self) -> None:
        """Every engine has joined when this returns."""
        self.registry.start(self.executor)
        self.service.start()
        for engine in self.engines:
            engine.join()
        while len(self.registry.alive) < len(self.engines):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """End what is pending, and all tasks."""
        self.service.close()
        await self.registry.close()


@asynccontextmanager
async def running_cluster(
    loop: SimulatedLoop,
    config: ManagerConfig,
    tokenizer: Tokenizer,
    engines: Sequence[EngineSpec],
    text: MadeUpText | None = None,
) -> AsyncIterator[Cluster]:
    """A cluster that takes requests."""
    cluster = Cluster(loop, config, tokenizer, engines, text)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.close()
