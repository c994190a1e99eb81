"""Engines that cannot join because of their keys, which ZeroMQ refuses without a word to anybody."""

from __future__ import annotations

import asyncio
import logging

import zmq
from zmq.utils.monitor import recv_monitor_message

from .clock import now_s

log = logging.getLogger(__name__)
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVERY_S = 10.0  # a peer tries again several times a second


class Refusals:
    """Logs, now and then, that connections of ``socket`` failed in their handshake. Made before it is
    bound."""

    def __init__(self, socket: zmq.Socket[bytes], loop: asyncio.AbstractEventLoop, *, has_keys: bool) -> None:
        self._monitor = socket.get_monitor_socket(_FAILED)
        self._loop = loop
        self._reason = "no keys, or others than are admitted" if has_keys else "keys, and this manager none"
        self._count = 0
        self._told_s = float("-inf")
        loop.add_reader(self._monitor.fileno(), self._take)
        self._take()  # the descriptor tells of what comes after a look that found nothing

    def _take(self) -> None:
        """All that are there: the descriptor tells of them once."""
        while True:
            try:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                break
            self._count += 1
        if self._count and now_s() - self._told_s >= _EVERY_S:
            self._told_s = now_s()
            log.warning(
                "an engine cannot join, it seems to have %s (--curve-keys, docs/tenants.md); %d attempts",
                self._reason,
                self._count,
            )
            self._count = 0

    def close(self) -> None:
        """Before the socket is closed."""
        self._loop.remove_reader(self._monitor.fileno())
