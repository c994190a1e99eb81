"""How one life of an engine is doing: whether it is heard of, gets on, and keeps the pace that it said."""

from __future__ import annotations

from dataclasses import dataclass

from .. import wire

SILENT_BEATS = 2.5  # heartbeats that have to be missing before no more calls go there
_WINDOW_US = 50_000  # of expected computing, over which the pace is taken
_MAX_SLOWDOWN = 1000.0
_WORTH_TELLING = 1.25
_RECOVERY = 0.9  # what an idle engine keeps, per heartbeat, of what it was too slow


class Slowdown:
    """How many times what its cost model says an engine's steps take: ``factor``. It is 1 at least: what is
    expected counts a shared prefix once per call, and so errs on the long side. An engine that makes no steps
    is by and by held to be as quick again as it was at its start, so that it is tried again some time."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._at_rest = 1.0
        self._told = 1.0
        self._busy_us = 0
        self._expected_us = 0
        self._num_steps = 0

    def observe(self, stats: wire.EngineStats) -> float | None:
        """The slowdown if it is worth telling by now."""
        if stats.num_steps == self._num_steps:
            self.factor = self._at_rest + (self.factor - self._at_rest) * _RECOVERY
        self._num_steps = stats.num_steps
        busy_us, expected_us = stats.busy_us - self._busy_us, stats.expected_us - self._expected_us
        if expected_us >= _WINDOW_US:
            ratio = min(max(busy_us / expected_us, 1.0), _MAX_SLOWDOWN)
            self.factor = (self.factor + ratio) / 2
            self._busy_us, self._expected_us = stats.busy_us, stats.expected_us
        return self._news()

    def repriced(self, at_rest: float, stats: wire.EngineStats | None) -> None:
        """The cost model is another one, by which steps took ``at_rest`` times as long at the start."""
        self.factor = self._told = 1.0
        self._at_rest = at_rest
        if stats is not None:
            self._busy_us, self._expected_us = stats.busy_us, stats.expected_us

    def _news(self) -> float | None:
        is_back = abs(self.factor - 1) < 0.05 < abs(self._told - 1)
        change = max(self.factor / self._told, self._told / self.factor)
        if not is_back and change < _WORTH_TELLING:
            return None
        self._told = 1.0 if is_back else self.factor
        return self._told


class Progress:
    """Since when an engine that has calls has not got on with any of them."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.count = -1

    def heard(self, stats: wire.EngineStats, now: float) -> None:
        """Its counters have come."""
        count = count_progress(stats)
        if count != self.count:
            self.count, self.since = count, now


def count_progress(stats: wire.EngineStats) -> int:
    """A number that grows with everything that brings calls nearer to their end."""
    return stats.prefill_tokens + stats.decode_tokens + stats.calls_ended


@dataclass(frozen=True, slots=True)
class Stalled:
    """A life that was given up because it had calls and made no step. It is told to join anew, and to forget
    its calls, once it computes again or has nothing to do."""

    name: str
    reason: str
    progress: int

    def is_over(self, message: wire.Heartbeat | wire.StepReplies) -> bool:
        """Whether this message shows that its loop turns again."""
        stats = message.stats
        has_nothing = stats.turn_us == 0 and stats.num_running + stats.num_waiting == 0
        return has_nothing or count_progress(stats) != self.progress
