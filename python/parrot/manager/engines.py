"""The manager's end of the engine protocol: a ROUTER socket and the registry of engines behind it.

Engines are known by name and epoch: a new epoch under an old name means that the old process died. An engine
is lost when it is silent for ``lost_after_s``, says goodbye, or its connection is gone. A frame that is not a
message is counted, logged and dropped.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from .. import wire
from ..api import EngineView
from ..config import ManagerConfig
from .clock import ClockOffset, now_s, now_us
from .engine_socket import EngineSocket, RouterSocket
from .frames import FrameOrder

log = logging.getLogger(__name__)
_MAX_INVITED = 4096
_HUNG_AFTER_LOSSES = 3  # times the silence after which an engine is lost


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
    alive: bool = True
    num_dispatched: int = 0  # calls sent to it that have not ended

    @property
    def name(self) -> str:
        """The name it registered under."""
        return self.registration.name

    def view(self) -> EngineView:
        """This engine as the API shows it."""
        info = self.registration
        return EngineView(
            name=info.name,
            alive=self.alive,
            pid=info.pid,
            model=info.model.name,
            device=info.model.device,
            dtype=info.model.dtype,
            cost_model=msgspec.structs.asdict(info.cost_model),
            stats=msgspec.structs.asdict(self.stats) if self.stats is not None else {},
            num_dispatched=self.num_dispatched,
        )


class EngineEvents(Protocol):
    """What the registry tells the executor; called on the loop, never concurrently."""

    def admits_engine(self, registration: wire.Register) -> str | None:
        """None to take the engine in, else why not."""

    def engine_joined(self, engine: Engine) -> None:
        """The engine can be sent calls."""

    def engine_lost(self, engine: Engine, reason: str) -> None:
        """The engine is gone; no reply of it will follow."""

    def engine_replied(self, engine: Engine, replies: tuple[wire.Reply, ...]) -> None:
        """All replies of one step."""


class EngineRegistry:
    """Binds a socket at construction (inside a running loop), unless it is given one to use; :meth:`close`
    ends it within 2 s."""

    def __init__(self, config: ManagerConfig, socket: EngineSocket | None = None) -> None:
        self._config = config
        self._events: EngineEvents | None = None
        self._manager_id = secrets.token_hex(8)
        self._engines: dict[str, Engine] = {}  # newest life of each name
        self._by_epoch: dict[str, Engine] = {}  # alive only
        self._by_id: dict[int, Engine] = {}  # alive only
        self._invited: dict[str, str] = {}  # epoch -> manager id it was told
        self._refused: set[str] = set()  # epochs
        self._replaced: set[str] = set()  # epochs of lives whose name a later one has
        self._next_id = 1
        self._tasks: list[asyncio.Task[None]] = []
        self.num_dropped_frames = 0
        self._socket: EngineSocket = socket or RouterSocket(config.engine_host, config.engine_port)
        self.address = self._socket.address

    def start(self, events: EngineEvents) -> None:
        """Begin to receive and to send heartbeats."""
        self._events = events
        self._tasks = [
            asyncio.create_task(self._receive_loop(), name="engine-receive"),
            asyncio.create_task(self._heartbeat_loop(), name="engine-heartbeat"),
        ]

    async def close(self, *, shut_down_engines: bool = False) -> None:
        """Close the socket without waiting for dead peers; optionally tell the engines to end."""
        if shut_down_engines:
            for engine in list(self._by_epoch.values()):
                self.send(engine, wire.Shutdown())
            await asyncio.sleep(0.05)  # lets the I/O thread put the frames on the wire
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    @property
    def alive(self) -> list[Engine]:
        """Engines that can be sent calls."""
        return list(self._by_epoch.values())

    def get(self, engine_id: int) -> Engine | None:
        """The living engine of this id."""
        return self._by_id.get(engine_id)

    def process_ended(self, pid: int) -> bool:
        """A child process has ended: its engine is lost without waiting for heartbeats. Whether it joined."""
        lives = [engine for engine in self._engines.values() if engine.registration.pid == pid]
        for engine in lives:
            self._lose(engine, "its process ended")
        return bool(lives)

    def has_hung(self, pid: int) -> bool:
        """Whether the engine of this process was lost so long ago that it will not come back by itself."""
        latest = now_s() - _HUNG_AFTER_LOSSES * self._config.lost_after_s
        return any(
            engine.registration.pid == pid and not engine.alive and engine.last_seen < latest
            for engine in self._engines.values()
        )

    def views(self) -> tuple[EngineView, ...]:
        """Newest life of every name."""
        return tuple(engine.view() for engine in self._engines.values())

    def send(self, engine: Engine, message: wire.ToEngine) -> bool:
        """One frame, at once. False, and the engine is lost, when its connection is gone."""
        if not engine.alive:
            return False
        if self._send_frame(engine.identity, message):
            return True
        # Later in this turn: the caller is in the middle of its own bookkeeping.
        asyncio.get_running_loop().call_soon(self._lose, engine, "its connection is gone")
        return False

    def _send_frame(self, identity: bytes, message: wire.ToEngine) -> bool:
        return self._socket.send(identity, wire.encode(message))

    async def _receive_loop(self) -> None:
        while True:
            parts = await self._socket.receive()
            try:
                self._receive(parts)
            except wire.WireError as error:
                self.num_dropped_frames += 1
                log.warning("dropped frame %d of an engine: %s", self.num_dropped_frames, error.message[:300])
            except Exception:
                log.exception("a frame of an engine could not be handled")
            await asyncio.sleep(0)  # receiving what is there already does not yield to requests

    def _receive(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            raise wire.WireError(f"a message of {len(parts)} parts, expected 2")
        identity, frame = parts
        message = wire.decode_from_engine(frame)
        if isinstance(message, wire.Register):
            self._register(identity, message)
            return
        engine = self._by_epoch.get(message.epoch)
        if engine is None:
            self._invite(identity, message.epoch)
            return
        engine.identity = identity
        engine.last_seen = now_s()
        if isinstance(message, wire.Goodbye):
            self._lose(engine, f"it left: {message.reason}", level=logging.INFO)
            return
        engine.stats = message.stats
        engine.clock.observe(message.stats.clock_us, now_us())
        if isinstance(message, wire.Heartbeat):
            engine.frames.announced(message.sequence)
            if not engine.frames.is_complete:
                self.send(engine, wire.ReportContexts())
            return
        if engine.frames.arrived(message.sequence):
            log.warning("a frame of engine %s was lost; it is asked what it has", engine.name)
            self.send(engine, wire.ReportContexts())
        if message.manager_id not in ("", engine.manager_id):
            log.info("engine %s finished a step of calls of an earlier manager; dropped", engine.name)
            return
        if self._events is not None:
            self._events.engine_replied(engine, message.replies)

    def _invite(self, identity: bytes, epoch: str) -> None:
        """A stranger, or an engine given up for lost, is alive: a fresh manager id makes it register. One
        whose name has gone to a later process ends: they would take the name from each other for ever."""
        if epoch in self._refused:
            return
        if epoch in self._replaced:
            self._send_frame(identity, wire.Shutdown())
            return
        if len(self._invited) > _MAX_INVITED:
            self._invited.clear()
        manager_id = self._invited.setdefault(epoch, secrets.token_hex(8))
        self._send_frame(identity, wire.Ping(manager_id))

    def _register(self, identity: bytes, message: wire.Register) -> None:
        known = self._by_epoch.get(message.epoch)
        if known is not None:
            known.identity = identity
            known.last_seen = now_s()
            self._send_frame(identity, wire.Ping(known.manager_id))
            return
        if message.epoch in self._replaced:
            self._send_frame(identity, wire.Shutdown())
            return
        refusal = self._refusal(message)
        if refusal is not None:
            if message.epoch not in self._refused:
                log.error("engine %s (pid %d) refused: %s", message.name, message.pid, refusal)
                self._refused.add(message.epoch)
            self._send_frame(identity, wire.Shutdown())
            return
        previous = self._engines.get(message.name)
        if previous is not None and previous.registration.epoch != message.epoch:
            self._replaced.add(previous.registration.epoch)
            self._lose(previous, "a new process registered under its name")
        manager_id = self._invited.pop(message.epoch, self._manager_id)
        engine = Engine(self._next_id, identity, message, manager_id, now_s())
        self._next_id += 1
        self._engines[message.name] = engine
        self._by_epoch[message.epoch] = engine
        self._by_id[engine.engine_id] = engine
        self._send_frame(identity, wire.Ping(manager_id))
        log.info("engine %s (pid %d) joined with model %s", message.name, message.pid, message.model.name)
        if self._events is not None:
            self._events.engine_joined(engine)

    def _refusal(self, message: wire.Register) -> str | None:
        if message.protocol_version != wire.PROTOCOL_VERSION:
            return f"it speaks protocol {message.protocol_version}, the manager {wire.PROTOCOL_VERSION}"
        return self._events.admits_engine(message) if self._events is not None else None

    async def _heartbeat_loop(self) -> None:
        expected = now_s()
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            now = now_s()
            stall = now - expected - self._config.heartbeat_s
            expected = now
            for engine in list(self._by_epoch.values()):
                # Time in which this loop itself stood still is no silence of the engine.
                engine.last_seen += max(stall, 0.0)
                if now - engine.last_seen > self._config.lost_after_s:
                    self._lose(engine, f"no frame for {self._config.lost_after_s:g} s")
                else:
                    self.send(engine, wire.Ping(engine.manager_id))

    def _lose(self, engine: Engine, reason: str, *, level: int = logging.WARNING) -> None:
        if not engine.alive:
            return
        engine.alive = False
        del self._by_epoch[engine.registration.epoch]
        del self._by_id[engine.engine_id]
        log.log(level, "engine %s (pid %d) is gone: %s", engine.name, engine.registration.pid, reason)
        if self._events is not None:
            self._events.engine_lost(engine, reason)
