"""The context tree: batched extends, fork, match, block tables and eviction, through its Python binding.

Every figure includes the Python call that carries the batch or the event.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np

from parrot._core import AttentionPlanner, ContextTree

from .context_builder import BLOCK, Builder, Ids
from .timing import (
    Spread,
    latencies,
    of_repeats,
    print_table,
    resident_growth,
    show,
    show_latency,
    spread,
    time_calls,
)

PROMPT = 6_000  # tokens of the shared prefix
OWN = 400  # tokens that a context adds to it, or has alone in the cache that is too small
CACHE_FOR = 40  # contexts that fit into that cache


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each part repeats; ``num_cached`` contexts of 2,000 tokens weigh a cached token."""

    batches: tuple[int, ...] = (64, 256)
    num_steps: int = 400
    num_events: int = 2_000
    num_parents: int = 100
    num_contexts: int = 512
    num_turns: int = 4_000
    num_cached: int = 500
    repeats: int = 5


FULL = Sizes()
QUICK = Sizes(num_steps=100, num_events=500, num_parents=20, num_turns=1_000, num_cached=250)


def run(quick: bool) -> dict[str, Any]:
    """Measure all parts and print them."""
    return measure(QUICK if quick else FULL)


def measure(sizes: Sizes) -> dict[str, Any]:
    """All parts at ``sizes``; a tree that is wrong afterwards raises RuntimeError."""
    memory = _bytes_per_token(sizes)
    extends = {str(batch): _extends_per_s(sizes, batch) for batch in sizes.batches}
    events = {
        **_forks_and_opens(sizes),
        f"fork that splits a node of {PROMPT:,}": _fork_inside(sizes),
        f"block_tables, 64 x {(PROMPT + OWN) // BLOCK} blocks": _block_tables(sizes),
        **_plans(sizes),
    }
    churn = _churn(sizes)
    print_table(
        f"one event, its Python call included; {of_repeats(sizes.repeats)}",
        ("", "p50 us", "p99 us"),
        [(name, *show_latency(figure)) for name, figure in events.items()],
    )
    many = f"{sizes.num_contexts} contexts in a cache for {CACHE_FOR}"
    rates = [
        *((f"tokens/s, extend {batch} contexts x 1", show(extends[batch], 0)) for batch in extends),
        (f"turns/s, {many}", show(churn["turns_per_s"], 0)),
        (f"blocks/s evicted, {many}", show(churn["evicted_per_s"], 0)),
        ("bytes per cached token", show(memory)),
    ]
    print_table(f"Python calls per batch or turn included; {of_repeats(sizes.repeats)}", ("", ""), rates)
    return {"extends_per_s": extends, "events": events, "churn": churn, "bytes_per_token": memory}


def _extends_per_s(sizes: Sizes, batch: int) -> Spread:
    total = 256 + sizes.num_steps * sizes.repeats
    builder = Builder(batch * (total // BLOCK + 2))
    for context_id in range(1, batch + 1):
        builder.create(context_id, builder.text(256))
    names, counts = np.arange(1, batch + 1, dtype=np.int64), np.ones(batch, np.int32)
    token_ids, slots = builder.text(batch), np.empty(batch, np.int32)
    rates = []
    for _ in range(sizes.repeats):
        start = perf_counter_ns()
        for _ in range(sizes.num_steps):
            builder.tree.reserve(names, counts, token_ids, slots)
            builder.tree.commit(names)
        rates.append(batch * sizes.num_steps * 1e9 / (perf_counter_ns() - start))
    builder.tree.lengths(names, slots)
    if (slots != total).any():
        raise RuntimeError(f"contexts have {slots} tokens, not {total}")
    builder.tree.check_invariants()
    return spread(rates)


def _forks_and_opens(sizes: Sizes) -> dict[str, dict[str, Spread]]:
    """Contexts on a prompt that another one holds, at the end of its node."""
    builder = Builder(PROMPT // BLOCK + 1)
    tree, prompt = builder.tree, builder.text(PROMPT)
    builder.create(1, prompt)
    names = range(2, 2 + sizes.num_events)
    forks, opens = [(name, 1, PROMPT) for name in names], [(name, 0, prompt, PROMPT) for name in names]
    fork_times, open_times = [], []
    for _ in range(sizes.repeats):
        fork_times.append(time_calls(tree.fork, forks))
        _free(tree, names)
        open_times.append(time_calls(tree.open, opens))
        _free(tree, names)
    tree.check_invariants()
    matched, expected = tree.counters()["matched_tokens"], PROMPT * (len(forks) + len(opens)) * sizes.repeats
    if matched != expected:
        raise RuntimeError(f"{matched} tokens were matched, not {expected}")
    return {
        f"fork at {PROMPT:,} tokens": latencies(fork_times),
        f"open, match of {PROMPT:,} tokens": latencies(open_times),
    }


def _free(tree: ContextTree, names: range) -> None:
    for name in names:
        tree.free(name)


def _fork_inside(sizes: Sizes) -> dict[str, Spread]:
    """Each parent is forked once: only the first fork at an offset splits the node."""
    count = sizes.num_parents
    builder = Builder(count * sizes.repeats * (PROMPT // BLOCK + 1))
    repeats = []
    for first in range(1, 2 * count * sizes.repeats, 2 * count):
        parents = range(first, first + count)
        for parent in parents:
            builder.create(parent, builder.text(PROMPT))
        forks = [(count + parent, parent, PROMPT // 2 + 1) for parent in parents]
        repeats.append(time_calls(builder.tree.fork, forks))
    builder.tree.check_invariants()
    return latencies(repeats)


def _block_tables(sizes: Sizes) -> dict[str, Spread]:
    """64 contexts of a shared prompt and OWN tokens each."""
    builder = Builder(PROMPT // BLOCK + 64 * (OWN // BLOCK + 2))
    prompt = builder.text(PROMPT)
    for context_id in range(1, 65):
        builder.create(context_id, np.concatenate([prompt, builder.text(OWN)]))
    names, out = np.arange(1, 65, dtype=np.int64), np.empty((64, (PROMPT + OWN) // BLOCK), np.int32)
    calls = [(names, out)] * (sizes.num_events // 4)
    repeats = [time_calls(builder.tree.block_tables, calls) for _ in range(sizes.repeats)]
    if (out < 0).any() or len(np.unique(out)) != PROMPT // BLOCK + 64 * OWN // BLOCK:
        raise RuntimeError("block tables with a gap, or without the shared prefix")
    return latencies(repeats)


def _plans(sizes: Sizes) -> dict[str, dict[str, Spread]]:
    """Attention of 256 requests on three shared levels (4,096, 8 x 1,024, 32 x 512) and up to 600 own tokens:
    by a planner that knows nothing, and by one whose requests have each grown by a token."""
    count, levels = 256, ((1, 4096), (8, 1024), (32, 512))
    ids = iter(range(1_000_000))
    shared = [[[next(ids) for _ in range(length // BLOCK)] for _ in range(width)] for width, length in levels]
    num_shared = sum(length for _, length in levels)
    tables = np.array(
        [
            [
                *(block for level in shared for block in level[row % len(level)]),
                *(next(ids) for _ in range(80)),
            ]
            for row in range(count)
        ],
        np.int32,
    )
    own = np.random.default_rng(0).integers(1, 600, count, dtype=np.int32)
    buffers = (np.empty((8192, 8), np.int32), np.empty((65536, 2), np.int32), np.empty(count + 1, np.int32))

    def plan(planner: AttentionPlanner, own: Ids) -> None:
        planner.plan(
            tables,
            num_shared + own,
            *buffers,
            group_size=4,
            num_kv_heads=8,
            num_workers=264,
        )

    anew, grown = [], []
    for _ in range(sizes.repeats):
        steps = [own + step for step in range(sizes.num_events // 10)]
        anew.append(time_calls(plan, [(AttentionPlanner(), step) for step in steps]))
        planner = AttentionPlanner()
        plan(planner, own)
        grown.append(time_calls(plan, [(planner, step) for step in steps]))
        if planner.num_searches != 1:
            raise RuntimeError(f"{planner.num_searches} searches for requests that only grew")
    return {f"plan of {count} requests": latencies(anew), f"plan of {count} grown ones": latencies(grown)}


def _churn(sizes: Sizes) -> dict[str, Spread]:
    """Turns of contexts at random: open on what is left, compute the rest, release; the old name goes."""
    builder = Builder(CACHE_FOR * OWN // BLOCK)
    tree, rng = builder.tree, random.Random(0)
    prompts = [builder.text(OWN) for _ in range(sizes.num_contexts)]
    names: dict[int, int] = {}
    next_name, turns, evicted = 1, [], []
    for repeat in range(sizes.repeats + 1):  # the first one fills the cache
        order = rng.choices(range(sizes.num_contexts), k=sizes.num_turns)
        before, start = tree.counters()["evicted_blocks"], perf_counter_ns()
        for which in order:
            builder.create(next_name, prompts[which])
            tree.release(next_name)
            if which in names:
                tree.free(names[which])
            names[which] = next_name
            tree.take_evicted()
            next_name += 1
        seconds = (perf_counter_ns() - start) / 1e9
        if repeat:
            turns.append(sizes.num_turns / seconds)
            evicted.append((tree.counters()["evicted_blocks"] - before) / seconds)
    tree.check_invariants()
    return {"turns_per_s": spread(turns), "evicted_per_s": spread(evicted)}


def _bytes_per_token(sizes: Sizes) -> Spread:
    length = 2_000
    prompts = np.random.default_rng(1).integers(0, 30_000, (sizes.num_cached, length), dtype=np.int32)

    def fill() -> ContextTree:
        builder = Builder(sizes.num_cached * length // BLOCK)
        for context_id, prompt in enumerate(prompts, 1):
            builder.create(context_id, prompt)
            builder.tree.release(context_id)
        return builder.tree

    growth = resident_growth(fill, sizes.repeats)
    return spread([grown / prompts.size for grown in growth])
