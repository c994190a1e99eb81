"""What the log says of engines that come and go; as often as anybody who can reach their socket likes."""

from __future__ import annotations

import logging

from .. import wire
from .limited_log import LimitedLog

_MAX_BAD_LINES = 5  # a minute, of one kind
_MAX_LIFE_LINES = 100  # a minute: of engines that come, and of those that go
MAX_REASON = 300


class EngineLog:
    """Lines of ``log``, some of each kind a minute."""

    def __init__(self, log: logging.Logger) -> None:
        self._dropped = LimitedLog(log, most=_MAX_BAD_LINES)
        self._refused = LimitedLog(log, most=_MAX_BAD_LINES)
        self._joined = LimitedLog(log, most=_MAX_LIFE_LINES)
        self._gone = LimitedLog(log, most=_MAX_LIFE_LINES)

    def dropped(self, number: int, error: wire.WireError) -> None:
        """A frame was no message; the ``number``-th one."""
        reason = error.message[:MAX_REASON]
        self._dropped.line(logging.WARNING, "dropped frame %d of an engine: %s", number, reason)

    def refused(self, engine: wire.Register, why: str) -> None:
        """An engine may not join."""
        self._refused.line(logging.ERROR, "engine %s (pid %d) refused: %s", engine.name, engine.pid, why)

    def joined(self, engine: wire.Register) -> None:
        """An engine has joined."""
        model = engine.model.name
        self._joined.line(
            logging.INFO, "engine %s (pid %d) joined with model %s", engine.name, engine.pid, model
        )

    def gone(self, engine: wire.Register, reason: str, level: int) -> None:
        """An engine has left, or is lost."""
        self._gone.line(level, "engine %s (pid %d) is gone: %s", engine.name, engine.pid, reason)
