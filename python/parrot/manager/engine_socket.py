"""The socket that engines join at: a ZeroMQ ROUTER, or whatever stands in for it in a simulation."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ..curve import AdmittedEngines, KeyPair, load_manager_keys
from ..errors import PortInUse
from .clock import now_s
from .refusals import Refusals

# As numbers: those of zmq are of a Flag, whose operators take a microsecond each.
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_MAX_FRAME_BYTES = 256 * 2**20
_MAX_PARTS = 3  # of a message that are handed over: one more than any has that keeps to the protocol
_TURN_S = 0.003  # of handing over messages, until others on the loop have their turn

Receiver = Callable[[list[bytes]], None]
"""Takes a message, which is identity and frame if its sender keeps to the protocol, and else no more than its
first parts. Must not raise."""


class EngineSocket(Protocol):
    """Frames to and from engines, each of which has an identity."""

    @property
    def address(self) -> str:
        """Where engines connect."""

    @property
    def local_address(self) -> str:
        """Where engines that the manager started connect."""

    def send(self, identity: bytes, frames: Sequence[bytes]) -> bool:
        """At least one frame, at once; False when nobody of this identity is connected."""

    def start(self, receive: Receiver) -> None:
        """From now on hand every message over on the loop, in the order in which they came."""

    def take_blocked_s(self) -> float:
        """Seconds, of those since it was last asked, in which what one peer sent held up the frames of all
        others."""

    def close(self) -> None:
        """End without waiting for dead peers."""


class RouterSocket:
    """A ROUTER, bound to a TCP port and, for engines of this machine, to a Unix socket, which costs less.

    The latter has a name and no file, so that none is left behind by a process that was killed; only
    processes of the same user get through. Must be made inside a running loop; raises :class:`PortInUse`, and
    :class:`ConfigError` for ``curve_keys``, a directory of :mod:`parrot.curve`, that cannot be used."""

    def __init__(self, host: str, port: int, curve_keys: Path | None = None) -> None:
        pair = None if curve_keys is None else load_manager_keys(curve_keys)
        self._loop = asyncio.get_running_loop()
        self._receive: Receiver | None = None
        self._turn_is_due = False
        self._has_rest = False  # of a message whose first parts were handed over
        self._rest_since = 0.0
        self._blocked_s = 0.0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._configure()
        self._refusals = Refusals(self._socket, self._loop, has_keys=pair is not None)
        self._authenticator: ThreadAuthenticator | None = None
        if pair is not None and curve_keys is not None:
            self._authenticator = self._admit(pair, AdmittedEngines(curve_keys))
        host = "127.0.0.1" if host == "localhost" else host
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        address = f"tcp://{host}:{port or '*'}"
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._destroy()
            raise PortInUse(
                f"cannot listen for engines on {address}: {error}; choose another with --engine-port, or 0",
                param="engine_port",
            ) from None
        self._address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._local_address = f"ipc://@parrot-{secrets.token_hex(8)}"
        self._socket.bind(self._local_address)
        self._descriptor = self._socket.fileno()

    def _configure(self) -> None:
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Bounded by what the scheduler admits; a full queue would lose a call.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())

    def _admit(self, pair: KeyPair, engines: AdmittedEngines) -> ThreadAuthenticator:
        """Encrypt, and ask who connects; before the socket is bound, so that nobody slips in."""
        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback("*", engines)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        return authenticator

    @property
    def address(self) -> str:
        """See :class:`EngineSocket`."""
        return self._address

    @property
    def local_address(self) -> str:
        """See :class:`EngineSocket`."""
        return self._local_address

    def send(self, identity: bytes, frames: Sequence[bytes]) -> bool:
        """See :class:`EngineSocket`."""
        *first, last = frames
        try:
            self._socket.send(identity, _MORE)
            for frame in first:
                self._socket.send(frame, _MORE)
            self._socket.send(last, _NOW)
        except zmq.ZMQError:
            return False
        finally:
            # The descriptor tells of an arrival once, and a send may be what takes note of it.
            self._turn_soon()
        return True

    def start(self, receive: Receiver) -> None:
        """See :class:`EngineSocket`."""
        self._receive = receive
        self._loop.add_reader(self._descriptor, self._arrived)
        self._turn_soon()

    def _turn_soon(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _arrived(self) -> None:
        if (
            not self._turn_is_due
        ):  # else one of many turns over what has come before, each of a few ms, is next
            self._turn()

    def _turn(self) -> None:
        """Hand over what has come, without a task that would have to wake first."""
        if self._receive is None or self._context.closed:
            return
        self._turn_is_due = True  # no send within it asks for another one
        until = now_s() + _TURN_S
        while True:
            if self._has_rest:
                self._drop_rest(until)
            elif (parts := self._next()) is not None:
                self._receive(parts)
            else:
                self._turn_is_due = False
                return
            if now_s() >= until:
                self._loop.call_soon(self._turn)
                return

    def _next(self) -> list[bytes] | None:
        try:
            parts = [self._socket.recv(_NOW)]  # the identity, behind which a ROUTER has at least one part
        except zmq.Again:
            return None
        more = True
        while more and len(parts) < _MAX_PARTS:
            # A part that knows whether it is the last: the socket's option takes longer than a message.
            part = self._socket.recv(_NOW, copy=False)
            parts.append(part.bytes)
            more = part.more
        if more:
            self._has_rest, self._rest_since = True, now_s()
        return parts

    def _drop_rest(self, until: float) -> None:
        """ZeroMQ keeps a message together, so what nobody wants of it has to be taken out part by part, at
        half a microsecond each. A peer may have sent millions."""
        while self._socket.recv(_NOW, copy=False).more:
            if now_s() >= until:
                return
        self._has_rest = False
        self._blocked_s += now_s() - self._rest_since

    def take_blocked_s(self) -> float:
        """See :class:`EngineSocket`."""
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        if self._has_rest:
            now = now_s()
            blocked_s += now - self._rest_since
            self._rest_since = now
        return blocked_s

    def close(self) -> None:
        """See :class:`EngineSocket`."""
        self._loop.remove_reader(self._descriptor)
        self._destroy()

    def _destroy(self) -> None:
        self._refusals.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)
