"""Counters of an engine since it started."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .._core import ContextTree
from ..wire import EngineStats


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
    shared_decodes: int = 0
    dropped_messages: int = 0
    expected_us: float = 0
    calls_ended: int = 0
    pool_breaches: int = 0


def collect(
    counters: Counters, tree: ContextTree, num_running: int, num_waiting: int, clock_us: int
) -> EngineStats:
    """What the engine tells of itself."""
    native = tree.counters()
    return EngineStats(
        clock_us=clock_us,
        busy_us=counters.busy_us,
        num_steps=counters.num_steps,
        num_running=num_running,
        num_waiting=num_waiting,
        num_free_blocks=tree.num_free_blocks,
        num_evictable_blocks=tree.num_evictable_blocks,
        num_held_blocks=tree.num_held_blocks,
        prefill_tokens=counters.prefill_tokens,
        decode_tokens=counters.decode_tokens,
        cached_tokens=counters.cached_tokens,
        forks=native["forks"],
        cow_copies=native["cow_copies"],
        evicted_blocks=native["evicted_blocks"],
        hinted_contexts=counters.hinted_contexts,
        preemptions=counters.preemptions,
        early_fills=counters.early_fills,
        early_fill_tokens=counters.early_fill_tokens,
        shared_decodes=counters.shared_decodes,
        dropped_messages=counters.dropped_messages,
        expected_us=round(counters.expected_us),
        calls_ended=counters.calls_ended,
        pool_breaches=counters.pool_breaches,
    )
