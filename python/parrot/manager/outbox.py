"""Frames for engines, those for one engine as one message of ZeroMQ: each message on its own wakes two I/O
threads and the engine, which on a busy machine then take the loop's place on the processor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from .. import wire
from .engine import Engine
from .engine_socket import EngineSocket


class Outbox:
    """Sends each receiver its frames in the order in which they came, at :meth:`flush` or else in the loop's
    next turn. ``unreachable`` is told, at each of these times, of an engine whose connection is gone."""

    def __init__(self, socket: EngineSocket, *, unreachable: Callable[[Engine], None]) -> None:
        self._socket = socket
        self._unreachable = unreachable
        self._frames: dict[Engine | bytes, list[bytes]] = {}
        self._freed: dict[Engine, list[wire.ContextId]] = {}  # not told yet
        self._flush_is_due = False

    def put(self, receiver: Engine | bytes, message: wire.ToEngine) -> None:
        """One frame for an engine, or for who has this identity."""
        self._frames.setdefault(receiver, []).append(wire.encode(message))
        self._flush_soon()

    def free_later(self, engine: Engine, context_id: wire.ContextId) -> None:
        """Tell an engine that nobody will name this context again: in one frame with others, after what this
        turn of the loop still does, since nothing waits for it."""
        self._freed.setdefault(engine, []).append(context_id)
        self._flush_soon()

    def flush(self) -> None:
        """Send what is there, but for what was freed."""
        if not self._frames:
            return
        by_receiver, self._frames = self._frames, {}
        for receiver, frames in by_receiver.items():
            if isinstance(receiver, bytes):
                self._socket.send(receiver, frames)
            elif not self._socket.send(receiver.identity, frames):
                self._unreachable(receiver)
        # The I/O thread may be waiting for this very processor, and what comes next can wait.
        os.sched_yield()

    def _flush_soon(self) -> None:
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush_all)

    def _flush_all(self) -> None:
        self._flush_is_due = False
        freed, self._freed = self._freed, {}
        for engine, context_ids in freed.items():
            if engine.alive:
                engine.num_sent += 1
                self._frames.setdefault(engine, []).append(wire.encode(wire.FreeContexts(tuple(context_ids))))
        self.flush()
