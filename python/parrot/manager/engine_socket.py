"""The socket that engines join at: a ZeroMQ ROUTER, or whatever stands in for it in a simulation."""

from __future__ import annotations

import asyncio
from typing import Protocol

import zmq
import zmq.asyncio

from ..errors import PortInUse

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
    """A bound ROUTER. Must be made inside a running loop; raises :class:`PortInUse`."""

    def __init__(self, host: str, port: int) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._configure()
        host = "127.0.0.1" if host == "localhost" else host
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        address = f"tcp://{host}:{port or '*'}"
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise PortInUse(
                f"cannot listen for engines on {address}: {error}; choose another engine_port, or 0",
                param="engine_port",
            ) from None
        self._address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _configure(self) -> None:
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Bounded by what the scheduler admits; a full queue would lose a call.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)

    @property
    def address(self) -> str:
        """See :class:`EngineSocket`."""
        return self._address

    def send(self, identity: bytes, frame: bytes) -> bool:
        """See :class:`EngineSocket`."""
        # A send with NOBLOCK has ended, well or not, when it returns.
        sent = asyncio.ensure_future(self._socket.send_multipart([identity, frame], flags=zmq.NOBLOCK))
        return sent.done() and sent.exception() is None

    async def receive(self) -> list[bytes]:
        """See :class:`EngineSocket`."""
        return await self._socket.recv_multipart()

    def close(self) -> None:
        """See :class:`EngineSocket`."""
        self._context.destroy(linger=0)
