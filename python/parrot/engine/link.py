"""The engine's end of the wire: a DEALER socket that the step loop and a thread share.

The loop sends its replies itself, so that they wait neither for a thread to wake nor, in it, for the
interpreter's lock. The thread registers, receives, sends heartbeats while a long step runs, and notices a
silent manager. A lock is held around each use of the socket, and for no longer.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec
import zmq

from .. import wire
from ..curve import EngineKeys
from ..errors import ConfigError
from .sent_frames import SentFrames
from .stats import now_us

log = logging.getLogger(__name__)

REGISTER_EVERY_S = 1.0
STOP_GRACE_S = 8.0  # from a request to stop to the end of the process, whatever the loop does
EXIT_MANAGER_SILENT = 3
EXIT_REFUSED = 4
_GOODBYE_LINGER_MS = 500
_POLL_S = 0.25
_KEYS = "keys of one side alone, or of an engine that it does not admit, end like this (--curve-keys)"
_MAX_FRAME_BYTES = 256 * 2**20
# As numbers: those of zmq are of a Flag, whose operators take a microsecond each.
_NOW, _EVENTS, _ARRIVED = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)


@dataclass(frozen=True, slots=True)
class Stop:
    """The loop is to end after its current step."""

    reason: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Drain:
    """The loop is to end once the calls that it has are done."""

    reason: str


@dataclass(frozen=True, slots=True)
class ManagerChanged:
    """The first manager answers, or one that knows nothing of earlier calls and contexts has taken over."""

    manager_id: str


Event = (
    wire.Dispatch
    | wire.Abort
    | wire.FreeContexts
    | wire.ContextUses
    | wire.ReportContexts
    | ManagerChanged
    | Drain
    | Stop
)


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Where to connect, and when to give up. ``parent_pid`` None: the parent may end first. A turn of the
    loop that lasts ``stall_after_s`` is reported."""

    address: str
    heartbeat_s: float
    manager_timeout_s: float
    parent_pid: int | None = None
    drain_grace_s: float = 20.0
    stall_after_s: float = 30.0
    curve: EngineKeys | None = None  # None: in the clear, as on one machine


class Link:
    """Start it once the engine can take calls. ``events`` is read by the loop, all else is thread-safe."""

    def __init__(self, config: LinkConfig, register: wire.Register, stats: wire.EngineStats) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.num_dropped = 0  # frames that were no message
        self.served_manager_id = ""  # whose calls the loop runs; the loop's own
        self._config = config
        self._register = register
        self._stats = stats
        self._cost: wire.StepCost | None = None
        self._manager_id: str | None = None
        self._sequence = 0  # of the last StepReplies that were sent
        self._sent = SentFrames()
        self._num_received = 0  # frames since the manager's id was heard, pings excluded
        self._num_missing = 0
        self._turn_since: float | None = None  # None: the loop waits for work
        self._reported_turn: float | None = None
        self._drain_deadline: float | None = None
        self._stop_deadline: float | None = None
        self._context = zmq.Context()
        self._dealer = self._connect()
        self._lock = threading.Lock()  # whoever has it may use the socket
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._was_refused = False
        self._thread = threading.Thread(target=self._run, name="engine-link", daemon=True)

    def start(self) -> None:
        """Register and begin to listen."""
        self._thread.start()

    def publish(self, stats: wire.EngineStats, cost: wire.StepCost | None = None) -> None:
        """The statistics that heartbeats carry from now on, and what steps have come to take."""
        self._stats = stats
        self._cost = cost

    def begin_turn(self, *, waits: bool = False) -> None:
        """The loop begins another turn, or, with ``waits``, waits for work; called by the loop alone."""
        self._turn_since = None if waits else time.monotonic()

    def send(self, message: wire.FromEngine) -> None:
        """One message, on its way at once; called by the loop alone."""
        frame = wire.encode(message)
        with self._lock:
            self._put(frame)
        # ZeroMQ's thread may be waiting for this very processor, and the rest can wait for it. A frame that
        # the manager asks for in between is asked for again at the next heartbeat.
        os.sched_yield()
        with self._lock:
            if isinstance(message, wire.StepReplies):
                self._sequence = message.sequence
                self._sent.add(message.sequence, frame)
            has_arrived = self._has_arrived()
        # The socket's descriptor tells of an arrival once, and the send may be what took note of it.
        if has_arrived:
            os.eventfd_write(self._wake, 1)

    def drain(self, reason: str) -> None:
        """Ask the loop to finish what it has and end, within ``drain_grace_s``; asked again, to end at once.
        May be called from a signal handler."""
        if self._drain_deadline is not None:
            self.stop(f"{reason}, for the second time")
            return
        self._drain_deadline = time.monotonic() + self._config.drain_grace_s
        self.events.put(Drain(reason))

    def stop(self, reason: str, exit_code: int = 0) -> None:
        """Ask the loop to end; the process ends within STOP_GRACE_S. May be called from a signal handler."""
        if self._stop_deadline is None:
            self._stop_deadline = time.monotonic() + STOP_GRACE_S
            self.events.put(Stop(reason, exit_code))

    def close(self, reason: str) -> None:
        """Say goodbye and close; under 2 s also when nobody listens."""
        self.send(wire.Goodbye(self._register.epoch, reason))
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=1.0)
        os.close(self._wake)
        self._context.destroy(linger=_GOODBYE_LINGER_MS)

    # --- the thread ----------------------------------------------------------------------------------------

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        # No limit: an engine whose manager is away ends after the timeout, which bounds the queue.
        socket.set_hwm(0)
        curve = self._config.curve
        if curve is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, curve.manager)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.own.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, curve.own.secret)
        try:
            socket.connect(self._config.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"manager_address = {self._config.address!r} cannot be connected to: {error}",
                param="manager_address",
            ) from None
        return socket

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("the link to the manager failed")
            self.stop("the link to the manager failed", exit_code=1)
            self._watch_stop_forever()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._dealer.fileno(), select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        poll_ms = int(min(_POLL_S, self._config.heartbeat_s) * 1000)
        timers = self._timers()
        while not self._is_closing:
            for timer in timers:
                timer.run_if_due()
            self._receive_all()  # what a send of a timer took note of
            ready = poller.poll(poll_ms)
            self._receive_all()  # before anything else: it may be a call
            if any(descriptor == self._wake for descriptor, _ in ready):
                os.eventfd_read(self._wake)

    def _timers(self) -> list[_Timer]:
        self._last_ping = time.monotonic()
        return [
            _Timer(self._register_again, REGISTER_EVERY_S),
            _Timer(self._heartbeat, self._config.heartbeat_s),
            _Timer(self._watch_manager, _POLL_S),
            _Timer(self._watch_parent, _POLL_S),
            _Timer(self._watch_stop, _POLL_S),
            _Timer(self._watch_turn, _POLL_S),
        ]

    def _receive_all(self) -> None:
        while frames := self._next():
            for frame in frames:
                try:
                    self._receive(wire.decode_to_engine(frame))
                except wire.WireError as error:
                    self.num_dropped += 1
                    log.warning("dropped frame %d of the manager: %s", self.num_dropped, error.message[:300])

    def _put(self, frame: bytes) -> None:
        """Send; with the lock held. A manager that refuses the connection leaves no place to put a frame: it
        is dropped, as one that gets lost on its way is, and sent again by who asks for it."""
        try:
            self._dealer.send(frame, _NOW)
        except zmq.Again:
            if not self._was_refused:
                self._was_refused = True
                log.warning("the manager at %s refuses the connection: %s", self._config.address, _KEYS)

    def _has_arrived(self) -> bool:
        return bool(cast(int, self._dealer.getsockopt(_EVENTS)) & _ARRIVED)

    def _next(self) -> list[bytes]:
        """The frames that came as one message; none if there is no message."""
        with self._lock:
            try:
                part = self._dealer.recv(_NOW, copy=False)
            except zmq.Again:
                return []
            frames = [part.bytes]
            while part.more:
                part = self._dealer.recv(_NOW, copy=False)
                frames.append(part.bytes)
        return frames

    def _receive(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Ping):
            self._ping(message)
            return
        self._num_received += 1
        if isinstance(message, wire.Shutdown) and message.refusal:
            self.stop(f"the manager refuses it: {message.refusal}", EXIT_REFUSED)
        elif isinstance(message, wire.Shutdown):
            self.stop("the manager asked for it")
        elif isinstance(message, wire.Resend):
            self._send_again(message.sequence)
        else:
            self.events.put(message)

    def _send_again(self, sequence: int) -> None:
        with self._lock:
            for frame in self._sent.since(sequence):
                self._put(frame)

    def _ping(self, ping: wire.Ping) -> None:
        self._last_ping = time.monotonic()
        if ping.manager_id == self._manager_id:
            self._num_missing = max(self._num_missing, ping.num_frames - self._num_received)
            return
        if self._manager_id is not None:
            log.warning("another manager (%s) answers; running calls are dropped", ping.manager_id)
        else:
            log.info("engine %s: the manager answers", self._register.name)
        self.events.put(ManagerChanged(ping.manager_id))
        self._manager_id = ping.manager_id
        self._num_received = self._num_missing = 0
        self._send_register()
        if self._drain_deadline is not None:  # this manager does not know
            draining = wire.Draining(self._register.epoch, "it was asked to end")
            with self._lock:
                self._put(wire.encode(draining))

    def _send_register(self) -> None:
        with self._lock:
            register = msgspec.structs.replace(self._register, sequence=self._sequence)
            self._put(wire.encode(register))

    def _register_again(self) -> None:
        if self._manager_id is None:
            self._send_register()

    def _heartbeat(self) -> None:
        if self._manager_id is None:
            return
        since = self._turn_since
        stats = msgspec.structs.replace(
            self._stats,
            clock_us=now_us(),
            dropped_messages=self.num_dropped,
            turn_us=0 if since is None else 1 + int((time.monotonic() - since) * 1e6),
        )
        with self._lock:
            beat = wire.Heartbeat(self._register.epoch, stats, self._sequence, self._num_missing, self._cost)
            self._put(wire.encode(beat))

    def _watch_manager(self) -> None:
        if time.monotonic() - self._last_ping > self._config.manager_timeout_s:
            timeout_s, address = self._config.manager_timeout_s, self._config.address
            hint = "" if self._manager_id is not None else f"; if it runs: {_KEYS}"
            self.stop(f"no word from the manager at {address} for {timeout_s:g} s{hint}", EXIT_MANAGER_SILENT)

    def _watch_parent(self) -> None:
        if self._config.parent_pid is not None and os.getppid() != self._config.parent_pid:
            self.stop("the parent process is gone", EXIT_MANAGER_SILENT)

    def _watch_turn(self) -> None:
        """Tell, once, where a loop stands whose turn does not end."""
        since = self._turn_since
        if since is None or since == self._reported_turn:
            return
        lasted_s = time.monotonic() - since
        if lasted_s > self._config.stall_after_s:
            self._reported_turn = since
            log.error("the loop's present turn has lasted %.1f s; where each thread stands:", lasted_s)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)

    def _watch_stop(self) -> None:
        if self._drain_deadline is not None and time.monotonic() > self._drain_deadline:
            self.stop(f"calls were left after {self._config.drain_grace_s:g} s")
        if self._stop_deadline is not None and time.monotonic() > self._stop_deadline:
            log.error("the step loop did not end within %g s; the process ends without it", STOP_GRACE_S)
            os._exit(1)

    def _watch_stop_forever(self) -> None:
        while True:
            time.sleep(_POLL_S)
            self._watch_stop()


class _Timer:
    """Calls a function once per period, the first time at once."""

    def __init__(self, function: Callable[[], None], period_s: float) -> None:
        self._function = function
        self._period_s = period_s
        self._due = 0.0

    def run_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._period_s
            self._function()
