"""Counts of ended calls and how long they took, for ``/metrics``."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from .call import DONE, FAILED, Call

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Values by bucket, as Prometheus counts them; ``bounds`` are upper ends, in ascending order."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """One value more."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class CallCounts:
    """What has become of calls since the manager started. Error codes are a closed set (errors.py)."""

    def __init__(self) -> None:
        self.by_state: Counter[str] = Counter()
        self.failures_by_code: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.seconds = {phase: Histogram(BUCKETS_S) for phase in ("queued", "first_token", "total")}

    def ended(self, call: Call) -> None:
        """A call is done, failed or cancelled."""
        self.by_state[call.state.value] += 1
        if call.error is not None and call.state is FAILED:
            self.failures_by_code[call.error.code] += 1
        self.prompt_tokens += call.prompt_tokens
        self.cached_tokens += call.cached_tokens
        self.output_tokens += call.output_tokens
        if call.state is DONE:
            self._measure(call)

    def _measure(self, call: Call) -> None:
        timing = call.timing
        self._observe("queued", timing.ready_us, timing.dispatched_us)
        self._observe("first_token", timing.submitted_us, timing.first_token_us)
        self._observe("total", timing.submitted_us, timing.finished_us)

    def _observe(self, phase: str, start_us: int | None, end_us: int | None) -> None:
        if start_us is not None and end_us is not None:
            self.seconds[phase].observe(max(0, end_us - start_us) / 1e6)
