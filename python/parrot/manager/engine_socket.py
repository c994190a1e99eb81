"""The socket that engines join at: a ZeroMQ ROUTER, or whatever stands in for it in a simulation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol, cast

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ..curve import AdmittedEngines, KeyPair, load_manager_keys
from ..errors import PortInUse

# As numbers: those of zmq are of a Flag, whose operators take a microsecond each.
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _ARRIVED = int(zmq.EVENTS), int(zmq.POLLIN)
_MAX_FRAME_BYTES = 256 * 2**20


class EngineSocket(Protocol):
    """Frames to and from engines, each of which has an identity."""

    @property
    def address(self) -> str:
        """Where engines connect."""

    def send(self, identity: bytes, frame: bytes) -> bool:
        """One frame, at once; False when nobody of this identity is connected."""

    async def receive(self) -> list[bytes]:
        """The next message: identity and frame, if its sender keeps to the protocol."""

    def close(self) -> None:
        """End without waiting for dead peers."""


class RouterSocket:
    """A bound ROUTER. Must be made inside a running loop; raises :class:`PortInUse`, and :class:`ConfigError`
    for ``curve_keys``, a directory of :mod:`parrot.curve`, that cannot be used."""

    def __init__(self, host: str, port: int, curve_keys: Path | None = None) -> None:
        pair = None if curve_keys is None else load_manager_keys(curve_keys)
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None] | None = None  # what receive() waits for
        self._look_is_due = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._configure()
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
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._look)

    def _configure(self) -> None:
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Bounded by what the scheduler admits; a full queue would lose a call.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)

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

    def send(self, identity: bytes, frame: bytes) -> bool:
        """See :class:`EngineSocket`."""
        try:
            self._socket.send(identity, _MORE)
            self._socket.send(frame, _NOW)
        except zmq.ZMQError:
            return False
        finally:
            # The descriptor tells of an arrival once, and a send may be what takes note of it.
            if not self._look_is_due:
                self._look_is_due = True
                self._loop.call_soon(self._look)
        return True

    async def receive(self) -> list[bytes]:
        """See :class:`EngineSocket`."""
        while True:
            try:
                return self._socket.recv_multipart(_NOW)
            except zmq.Again:
                self._arrival = self._loop.create_future()
                await self._arrival

    def _look(self) -> None:
        self._look_is_due = False
        if self._arrival is None or self._arrival.done() or self._context.closed:
            return
        if cast(int, self._socket.getsockopt(_EVENTS)) & _ARRIVED:
            self._arrival.set_result(None)

    def close(self) -> None:
        """See :class:`EngineSocket`."""
        self._loop.remove_reader(self._descriptor)
        self._destroy()

    def _destroy(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)
