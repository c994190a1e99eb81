"""Noticing steps that lead nowhere: calls are there, the loop turns, and nothing is computed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..wire import EngineStats
from .stats import now_us

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)
_NUM_CALLS_SHOWN = 8


class StepWatchdog:
    """Told of every step; logs the engine's state once per stall, and the end of the stall. A single step
    that does not end is noticed by :class:`~parrot.engine.link.Link`, whose thread still runs then."""

    def __init__(self, stall_after_s: float) -> None:
        self._stall_after_us = round(stall_after_s * 1e6)
        self._progress = -1
        self._since_us = now_us()
        self._is_stalled = False

    def stepped(self, engine: Engine, stats: EngineStats) -> None:
        """A turn of the loop has ended."""
        progress, now = stats.prefill_tokens + stats.decode_tokens + stats.calls_ended, now_us()
        if progress != self._progress or not engine.has_work:
            if self._is_stalled:
                log.warning("steps compute again, after %.1f s", (now - self._since_us) / 1e6)
            self._progress, self._since_us, self._is_stalled = progress, now, False
        elif not self._is_stalled and now - self._since_us > self._stall_after_us:
            self._is_stalled = True
            log.error(
                "calls are there and nothing was computed for %.1f s: %s; %s",
                (now - self._since_us) / 1e6,
                stats,
                engine.describe_calls(_NUM_CALLS_SHOWN),
            )
