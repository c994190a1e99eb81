"""Frames for engines, sent together: each send on its own wakes the socket's I/O thread, which on a busy
machine then takes the loop's place on the processor."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from .. import wire
from .engine import Engine
from .engine_socket import EngineSocket


class Outbox:
    """Sends messages in the order in which they came, at :meth:`flush` or else in the loop's next turn.
    ``unreachable`` is told, once per frame, of an engine whose connection is gone."""

    def __init__(self, socket: EngineSocket, *, unreachable: Callable[[Engine], None]) -> None:
        self._socket = socket
        self._unreachable = unreachable
        self._frames: deque[tuple[Engine | bytes, bytes]] = deque()
        self._freed: dict[Engine, list[wire.ContextId]] = {}  # not told yet
        self._flush_is_due = False

    def put(self, receiver: Engine | bytes, message: wire.ToEngine) -> None:
        """One frame for an engine, or for who has this identity."""
        self._frames.append((receiver, wire.encode(message)))
        self._flush_soon()

    def free_later(self, engine: Engine, context_id: wire.ContextId) -> None:
        """Tell an engine that nobody will name this context again: in one frame with others, after what this
        turn of the loop still does, since nothing waits for it."""
        self._freed.setdefault(engine, []).append(context_id)
        self._flush_soon()

    def flush(self) -> None:
        """Send what is there, but for what was freed."""
        while self._frames:
            receiver, frame = self._frames.popleft()
            if isinstance(receiver, bytes):
                self._socket.send(receiver, frame)
            elif not self._socket.send(receiver.identity, frame):
                self._unreachable(receiver)

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
                self._frames.append((engine, wire.encode(wire.FreeContexts(tuple(context_ids)))))
        self.flush()
