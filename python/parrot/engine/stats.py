"""Counters of an engine since it started."""

from __future__ import annotations

import time
from dataclasses import dataclass


def now_us() -> int:
    """Microseconds of CLOCK_MONOTONIC."""
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class Counters:
    """What :class:`~parrot.wire.EngineStats` reports and the context tree does not count itself."""

    busy_us: int = 0
    num_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    hinted_contexts: int = 0
    early_fills: int = 0
    early_fill_tokens: int = 0
    dropped_messages: int = 0
