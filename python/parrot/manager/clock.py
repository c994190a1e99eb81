"""The manager's clock, and the estimate that shifts an engine's clock onto it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Clock = Callable[[], int]

_WINDOW_US = 60_000_000
_clock_ns: Clock = time.monotonic_ns


def now_us() -> int:
    """Microseconds of CLOCK_MONOTONIC, or of the clock that :func:`simulated_clock` put in its place."""
    return _clock_ns() // 1000


def now_s() -> float:
    """:func:`now_us` in seconds."""
    return _clock_ns() // 1000 / 1e6


@contextmanager
def simulated_clock(clock_us: Clock) -> Iterator[None]:
    """Until the end of the block, everything in the manager takes its time from ``clock_us``. One for the
    whole process: whatever part of it asks for the time, a simulation must never see the real one."""
    global _clock_ns
    before, _clock_ns = _clock_ns, lambda: clock_us() * 1000
    try:
        yield
    finally:
        _clock_ns = before


class ClockOffset:
    """Manager time minus engine time, as the least difference seen between a frame's sending (the engine's
    clock) and its arrival (ours): the frame that was under way the shortest errs the least. Minima are kept
    per window of a minute, so that the estimate follows drift."""

    def __init__(self) -> None:
        self.offset_us = 0  # the estimate; 0 before the first frame
        self._window_start_us = 0
        self._current: int | None = None
        self._previous: int | None = None

    def observe(self, engine_us: int, arrival_us: int) -> None:
        """A frame sent at ``engine_us`` arrived at ``arrival_us``."""
        sample = arrival_us - engine_us
        if self._current is None or arrival_us - self._window_start_us > _WINDOW_US:
            self._previous = self._current
            self._current = sample
            self._window_start_us = arrival_us
        else:
            self._current = min(self._current, sample)
        self.offset_us = self._current if self._previous is None else min(self._current, self._previous)

    def to_manager_us(self, engine_us: int) -> int:
        """A time of the engine on the manager's clock."""
        return engine_us + self.offset_us
