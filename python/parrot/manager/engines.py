"""The manager's end of the engine protocol: a ROUTER socket and the registry of engines behind it.

Engines are known by name and epoch: a new epoch under an old name means that the old process died. An engine
is lost when it is silent for ``lost_after_s``, says goodbye, its connection is gone, or it has calls and
makes no step for ``stall_after_s``. One that is silent for a few heartbeats, or drains, gets no more calls. A
frame that is not a message is counted, logged and dropped.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from .. import wire
from ..api import EngineView
from ..config import ManagerConfig
from .background import Background
from .clock import now_s, now_us
from .engine import Engine as Engine
from .engine import EngineEvents as EngineEvents
from .engine import EngineState
from .engine_log import MAX_REASON, EngineLog
from .engine_socket import EngineSocket, RouterSocket
from .frames import MAX_LOSSES, FrameOrder
from .health import SILENT_BEATS, Stalled
from .outbox import Outbox

log = logging.getLogger(__name__)
_MAX_INVITED = 4096
_HUNG_AFTER_LOSSES = 3  # times the silence after which an engine is lost
_MAX_GONE = 256  # names of engines that are gone, as far as they are remembered


class EngineRegistry:
    """Binds a socket at construction (inside a running loop), unless it is given one to use; :meth:`close`
    ends it within 2 s."""

    def __init__(self, config: ManagerConfig, socket: EngineSocket | None = None) -> None:
        self.background = Background()  # of the whole manager
        self._config = config
        self._events: EngineEvents | None = None
        self._manager_id = secrets.token_hex(8)
        self._engines: dict[str, Engine] = {}  # newest life of each name
        self._by_epoch: dict[str, Engine] = {}  # alive only
        self._by_id: dict[int, Engine] = {}  # alive only
        self._invited: dict[str, str] = {}  # epoch -> manager id it was told
        self._refused: set[str] = set()  # epochs
        self._replaced: set[str] = set()  # epochs of lives whose name a later one has
        self._stalled: dict[str, Stalled] = {}  # by epoch
        self._log = EngineLog(log)
        self._next_id = 1
        self._last_beat = 0.0
        self._beating: asyncio.Task[None] | None = None
        self.num_dropped_frames = 0
        self.num_resends = 0  # how often frames of an engine were asked for again
        self.num_lost_frames = 0  # how often frames of either side were missing, and did not come again
        self.num_cut_off = 0  # engines that were given up because hardly any frame came
        self._socket: EngineSocket = socket or RouterSocket(
            config.engine_host, config.engine_port, config.curve_keys
        )
        self._outbox = Outbox(self._socket, unreachable=self._unreachable)
        self.address = self._socket.address
        self.local_address = self._socket.local_address

    def start(self, events: EngineEvents) -> None:
        """Begin to receive and to send heartbeats."""
        self._events = events
        self._last_beat = now_s()
        self._socket.start(self._handle)
        self._beating = self.background.start("engine-heartbeat", self._beat)

    async def close(self, *, shut_down_engines: bool = False) -> None:
        """Close the socket without waiting for dead peers; optionally tell the engines to end."""
        if shut_down_engines:
            for engine in list(self._by_epoch.values()):
                self.send(engine, wire.Shutdown())
            self.flush()
            await asyncio.sleep(0.05)  # lets the I/O thread put the frames on the wire
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait((self._beating,))
        self._socket.close()

    @property
    def alive(self) -> list[Engine]:
        """Engines that can be sent calls."""
        return list(self._by_epoch.values())

    @property
    def engines(self) -> list[Engine]:
        """Newest life of every name."""
        return list(self._engines.values())

    @property
    def usable(self) -> list[Engine]:
        """Engines that are to be sent calls now."""
        return [engine for engine in self._by_epoch.values() if engine.state == "ready"]

    @property
    def stalled(self) -> list[str]:
        """What is known of engines that were given up because they made no step, and have not come back."""
        return [f"engine {stalled.name} {stalled.reason}" for stalled in self._stalled.values()]

    def get(self, engine_id: int) -> Engine | None:
        """The living engine of this id."""
        return self._by_id.get(engine_id)

    def process_ended(self, pid: int) -> bool:
        """A child process has ended: its engine is lost without waiting for heartbeats. Whether it joined."""
        lives = [engine for engine in self._engines.values() if engine.registration.pid == pid]
        for engine in lives:
            self._lose(engine, "its process ended")
        return bool(lives)

    def has_joined(self, pid: int) -> bool:
        """Whether the engine of this process has registered."""
        return any(engine.registration.pid == pid for engine in self._engines.values())

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

    def send(self, engine: Engine, message: wire.ToEngine) -> None:
        """One frame, in this turn of the loop or at :meth:`flush`. The engine is lost when its connection is
        gone."""
        if engine.alive:
            if not isinstance(message, wire.Ping):
                engine.num_sent += 1
            self._outbox.put(engine, message)

    def free_later(self, engine: Engine, context_id: wire.ContextId) -> None:
        """See :meth:`Outbox.free_later`."""
        self._outbox.free_later(engine, context_id)

    def flush(self) -> None:
        """Send what waits for the next turn of the loop."""
        self._outbox.flush()

    def _unreachable(self, engine: Engine) -> None:
        # Later in this turn: the caller may be in the middle of its own bookkeeping.
        asyncio.get_running_loop().call_soon(self._lose, engine, "its connection is gone")

    def _handle(self, parts: list[bytes]) -> None:
        """One message, whatever is in it."""
        try:
            self._receive(parts)
        except wire.WireError as error:
            self.num_dropped_frames += 1
            self._log.dropped(self.num_dropped_frames, error)
        except Exception as error:
            self.background.failed("engine-frame", error)

    def _receive(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            count = "one part" if len(parts) < 2 else "more than two parts"
            raise wire.WireError(f"a message of {count}, expected identity and frame")
        identity, frame = parts
        message = wire.decode_from_engine(frame)
        if isinstance(message, wire.Register):
            self._register(identity, message)
            return
        engine = self._by_epoch.get(message.epoch)
        if engine is None:
            self._hear_stranger(identity, message)
            return
        engine.identity = identity
        engine.last_seen = now_s()
        if engine.state == "silent":
            self._pause(engine, "ready")
        if isinstance(message, wire.Goodbye):
            why = f"it left: {message.reason[:MAX_REASON]}"
            self._lose(engine, why, level=logging.INFO, state="left")
            return
        if isinstance(message, wire.Draining):
            log.info("engine %s drains: %s", engine.name, message.reason[:MAX_REASON])
            self._pause(engine, "draining")
            return
        if isinstance(message, wire.StepReplies):
            self._step(engine, message)
        self._note_stats(engine, message.stats)  # after what the replies made ready has been sent
        if isinstance(message, wire.Heartbeat):
            self._heartbeat(engine, message)

    def _step(self, engine: Engine, message: wire.StepReplies) -> None:
        if not engine.frames.arrived(message.sequence):
            self._ask_again(engine)
            return
        if message.manager_id not in ("", engine.manager_id):
            log.info("engine %s finished a step of calls of an earlier manager; dropped", engine.name)
            return
        if self._events is not None:
            self._events.engine_replied(engine, message.replies)

    def _hear_stranger(
        self, identity: bytes, message: wire.Heartbeat | wire.StepReplies | wire.Draining | wire.Goodbye
    ) -> None:
        stalled = self._stalled.get(message.epoch)
        if isinstance(message, wire.Goodbye):
            self._stalled.pop(message.epoch, None)
            return
        if stalled is not None:
            if isinstance(message, wire.Draining) or not stalled.is_over(message):
                return
            log.warning("engine %s makes steps again", stalled.name)
            del self._stalled[message.epoch]
        self._invite(identity, message.epoch)

    def _note_stats(self, engine: Engine, stats: wire.EngineStats) -> None:
        if engine.stats is not None and stats.num_steps < engine.stats.num_steps:
            return  # of a frame that was sent again
        if engine.stats is not None and stats.pool_breaches > engine.stats.pool_breaches:
            log.error("the KV cache of engine %s broke and was made anew; its log has more", engine.name)
        engine.stats = stats
        engine.clock.observe(stats.clock_us, now_us())
        engine.progress.heard(stats, now_s())
        slowdown = engine.slowdown.observe(stats)
        if slowdown is not None and self._events is not None:
            log.debug("steps of engine %s take %.1f times what it said", engine.name, slowdown)
            self._events.engine_slowed(engine, slowdown)

    def _heartbeat(self, engine: Engine, message: wire.Heartbeat) -> None:
        if message.cost is not None and engine.reprice(message.cost) and self._events is not None:
            log.debug("steps of engine %s have come to take %s", engine.name, message.cost)
            self._events.engine_repriced(engine)
        has_missed = message.num_missing > engine.num_missing
        engine.num_missing = max(engine.num_missing, message.num_missing)
        if engine.frames.beats(message.sequence):
            self._ask_again(engine)
        if has_missed or engine.frames.gives_up():
            self._lost_frames(engine)
        elif not engine.frames.is_complete:
            self.send(engine, wire.ReportContexts())

    def _ask_again(self, engine: Engine) -> None:
        if engine.frames.asks():
            self.num_resends += 1
            log.info("a frame of engine %s is missing; it is asked for again", engine.name)
            self.send(engine, wire.Resend(engine.frames.newest + 1))

    def _lost_frames(self, engine: Engine) -> None:
        self.num_lost_frames += 1
        engine.frames.num_losses += 1
        if engine.frames.num_losses >= MAX_LOSSES:
            self.num_cut_off += 1
            self._lose(engine, f"frames were lost {MAX_LOSSES} times and none came in order meanwhile")
            return
        log.warning("frames to or from engine %s were lost; its calls run again", engine.name)
        self.send(engine, wire.ReportContexts())
        if self._events is not None:
            self._events.frames_lost(engine)

    def _pause(self, engine: Engine, state: EngineState) -> None:
        """Whether it gets calls; one that drains never does again."""
        if engine.state in (state, "draining"):
            return
        engine.state = state
        if self._events is not None:
            self._events.engine_paused(engine, state != "ready")

    def _invite(self, identity: bytes, epoch: str) -> None:
        """A stranger, or an engine given up for lost, is alive: a fresh manager id makes it register. One
        whose name has gone to a later process ends: they would take the name from each other for ever."""
        if epoch in self._refused:
            return
        if epoch in self._replaced:
            self._outbox.put(identity, wire.Shutdown())
            return
        if len(self._invited) > _MAX_INVITED:
            self._invited.clear()
        manager_id = self._invited.setdefault(epoch, secrets.token_hex(8))
        self._outbox.put(identity, wire.Ping(manager_id))

    def _register(self, identity: bytes, message: wire.Register) -> None:
        known = self._by_epoch.get(message.epoch)
        if known is not None:
            known.identity = identity
            known.last_seen = now_s()
            self._ping(known)
            return
        if message.epoch in self._replaced:
            self._outbox.put(identity, wire.Shutdown())
            return
        refusal = self._refusal(message)
        if refusal is not None:
            self._refuse(identity, message, refusal)
            return
        manager_id = self._invited.pop(message.epoch, self._manager_id)
        frames = FrameOrder(message.sequence)
        engine = Engine(self._next_id, identity, message, manager_id, now_s(), frames=frames)
        self._next_id += 1
        previous = self._engines.pop(message.name, None)  # to the end: the order is that of joining
        if not self._enter(engine, previous):
            return
        self._stalled.pop(message.epoch, None)
        if previous is not None and previous.registration.epoch != message.epoch:
            self._replaced.add(previous.registration.epoch)
            self._lose(previous, "a new process registered under its name")
        self._ping(engine)
        self._log.joined(message)

    def _enter(self, engine: Engine, previous: Engine | None) -> bool:
        """Take the engine in, here and with whoever hears of engines, or leave everything as it was."""
        message = engine.registration
        self._engines[message.name] = self._by_epoch[message.epoch] = self._by_id[engine.engine_id] = engine
        try:
            if self._events is not None:
                self._events.engine_joined(engine)
        except Exception as error:
            self._remove(engine, "lost")
            del self._engines[message.name]
            if previous is not None:
                self._engines[message.name] = previous
            self._refuse(engine.identity, message, f"{type(error).__name__}: {error}"[:MAX_REASON])
            return False
        return True

    def _refuse(self, identity: bytes, message: wire.Register, why: str) -> None:
        if message.epoch not in self._refused:
            self._log.refused(message, why)
            if len(self._refused) >= _MAX_INVITED:
                self._refused.clear()
            self._refused.add(message.epoch)
        self._outbox.put(identity, wire.Shutdown(why))

    def _refusal(self, message: wire.Register) -> str | None:
        if message.protocol_version != wire.PROTOCOL_VERSION:
            return f"it speaks protocol {message.protocol_version}, the manager {wire.PROTOCOL_VERSION}"
        return self._events.admits_engine(message) if self._events is not None else None

    async def _beat(self) -> None:
        await asyncio.sleep(self._config.heartbeat_s)
        now = now_s()
        # Time in which the loop stood still, or a peer held up the others, is no silence of an engine.
        stall = max(now - self._last_beat - self._config.heartbeat_s, self._socket.take_blocked_s(), 0.0)
        self._last_beat = now
        for engine in list(self._by_epoch.values()):
            engine.last_seen += stall
            with self.background.guarded("engine-heartbeat"):
                self._look_at(engine, now, stall)
        self._forget_the_gone()
        if self._events is not None:
            self._events.heartbeat()

    def _look_at(self, engine: Engine, now: float, stall: float) -> None:
        if engine.num_dispatched == 0:
            engine.progress.since = now
        engine.progress.since += stall
        silent_s, stalled_s = now - engine.last_seen, now - engine.progress.since
        if silent_s > self._config.lost_after_s:
            self._lose(engine, f"no frame for {self._config.lost_after_s:g} s")
            return
        if stalled_s > self._config.stall_after_s:
            self._give_up(engine, stalled_s)
            return
        if silent_s > SILENT_BEATS * self._config.heartbeat_s:
            self._pause(engine, "silent")
        self._ping(engine)

    def _give_up(self, engine: Engine, stalled_s: float) -> None:
        reason = f"has {engine.num_dispatched} calls and made no step for {stalled_s:.1f} s"
        self._stalled[engine.registration.epoch] = Stalled(engine.name, reason, engine.progress.count)
        self._lose(engine, reason, state="stalled")

    def _ping(self, engine: Engine) -> None:
        self.send(engine, wire.Ping(engine.manager_id, engine.num_sent))

    def _forget_the_gone(self) -> None:
        """Names may be new at every start: those of the dead must not pile up."""
        if len(self._engines) <= _MAX_GONE:
            return
        gone = [engine for engine in self._engines.values() if not engine.alive]
        for engine in gone[: max(0, len(gone) - _MAX_GONE)]:
            del self._engines[engine.name]
            self._stalled.pop(engine.registration.epoch, None)

    def _lose(
        self, engine: Engine, reason: str, *, level: int = logging.WARNING, state: EngineState = "lost"
    ) -> None:
        if not engine.alive:
            return
        self._remove(engine, state)
        self._log.gone(engine.registration, reason, level)
        if self._events is not None:
            self._events.engine_lost(engine, reason)

    def _remove(self, engine: Engine, state: EngineState) -> None:
        engine.state = state
        del self._by_epoch[engine.registration.epoch]
        del self._by_id[engine.engine_id]
