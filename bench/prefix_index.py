"""The prefix index: insert and match at up to a million prefixes, through its Python binding.

Every figure includes one Python call per prompt. At the smallest size the same prompts are looked up by
comparing them token by token with everything there is, in plain Python; the answers must be the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from parrot._core import PrefixIndex

from .timing import Spread, latencies, print_table, show, show_latency, spread, time_calls

Ids = npt.NDArray[np.int32]
KEY = bytes(range(16))
LENGTH = 32  # tokens of an entry, of which the first half is that of its family
FIRST_NEW_OWNER = 1 << 40
LONG, STRIDE = 6_000, 128  # a long prompt, and how far apart its boundaries are
BOUNDARIES = np.array([LENGTH], np.int32)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Entries of the index, look-ups per repeat, and how many of those the comparison does."""

    entries: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    num_calls: int = 10_000
    num_compared: int = 50
    repeats: int = 5


FULL = Sizes()
QUICK = Sizes(entries=(1_000, 10_000), num_calls=4_000, num_compared=20)


def _prompts(seed: int, count: int) -> Ids:
    """Prompts [count, LENGTH], the same for the same seed: one of 50 families' heads, then own tokens."""
    heads = np.random.default_rng(0).integers(0, 30_000, (50, LENGTH // 2), dtype=np.int32)
    prompts = np.random.default_rng(seed).integers(0, 30_000, (count, LENGTH), dtype=np.int32)
    prompts[:, : LENGTH // 2] = heads[np.arange(count) % len(heads)]
    return prompts


def run(quick: bool) -> dict[str, Any]:
    """Measure all sizes and print them; ``ok`` says whether the comparison gave the same answers."""
    return measure(QUICK if quick else FULL)


def measure(sizes: Sizes) -> dict[str, Any]:
    """All parts at ``sizes``."""
    compared = _compare(sizes)
    rows = {str(count): _at(sizes, count) for count in sizes.entries}
    print_table(
        f"entries of {LENGTH} tokens, one Python call each; median (least to most) of {sizes.repeats}",
        ("entries", "inserts/s", "matches/s", "match p50 us", "p99 us"),
        [
            (
                f"{int(count):,}",
                show(row["inserts_per_s"], 0),
                show(row["matches_per_s"], 0),
                *show_latency(row["match"]),
            )
            for count, row in rows.items()
        ],
    )
    print_table(
        f"a prompt of {LONG:,} tokens with a boundary every {STRIDE}, all of them known",
        ("entries", "insert p50 us", "p99 us", "match p50 us", "p99 us"),
        [
            (f"{int(count):,}", *show_latency(row["long_insert"]), *show_latency(row["long_match"]))
            for count, row in rows.items()
        ],
    )
    print_table(
        f"against token-by-token comparison with a dict of {compared['entries']:,} tuples",
        ("", "p50 us of one match"),
        [("index", show(compared["index_us"])), ("comparison", show(compared["comparison_us"], 0))],
    )
    return {"entries": rows, "comparison": compared, "ok": compared["same_answers"]}


def _filled(prompts: Ids) -> PrefixIndex:
    index = PrefixIndex(KEY)
    for owner, prompt in enumerate(prompts, 1):
        index.insert(owner, 0, prompt, BOUNDARIES)
    if len(index) != len(prompts):
        raise RuntimeError(f"the index has {len(index)} prefixes, not {len(prompts)}")
    return index


def _at(sizes: Sizes, count: int) -> dict[str, Any]:
    known = _prompts(1, count)
    index = _filled(known)
    rng = np.random.default_rng(2)
    inserts, matches, times = [], [], []
    for _ in range(sizes.repeats):
        inserts.append(_inserts_per_s(sizes, index))
        wanted = list(known[rng.integers(0, count, sizes.num_calls)])
        start = perf_counter_ns()
        for prompt in wanted:
            index.match(0, prompt, BOUNDARIES)
        matches.append(sizes.num_calls * 1e9 / (perf_counter_ns() - start))
        wanted = list(known[rng.integers(0, count, sizes.num_calls)])
        times.append(time_calls(index.match, [(0, prompt, BOUNDARIES) for prompt in wanted]))
    short = {
        "inserts_per_s": spread(inserts),
        "matches_per_s": spread(matches),
        "match": latencies(times),
    }
    return short | _long_prompts(sizes, index)


def _inserts_per_s(sizes: Sizes, index: PrefixIndex) -> float:
    """Into an index that has many already; afterwards it is as it was."""
    new = list(_prompts(3, sizes.num_calls))
    owners = range(FIRST_NEW_OWNER, FIRST_NEW_OWNER + len(new))
    start = perf_counter_ns()
    for owner, prompt in zip(owners, new, strict=True):
        index.insert(owner, 0, prompt, BOUNDARIES)
    rate = len(new) * 1e9 / (perf_counter_ns() - start)
    for owner in owners:
        index.remove(owner)
    return rate


def _long_prompts(sizes: Sizes, index: PrefixIndex) -> dict[str, dict[str, Spread]]:
    """Insert and match of prompts of LONG tokens that share nothing with each other."""
    boundaries = np.array([*range(STRIDE, LONG, STRIDE), LONG], np.int32)
    count = max(1, sizes.num_calls // 100)
    prompts = list(np.random.default_rng(4).integers(0, 30_000, (count, LONG), dtype=np.int32))
    inserted = [(FIRST_NEW_OWNER + i, 0, prompt, boundaries) for i, prompt in enumerate(prompts)]
    inserts, matches = [], []
    for _ in range(sizes.repeats):
        inserts.append(time_calls(index.insert, inserted))
        matches.append(time_calls(index.match, [(0, prompt, boundaries) for prompt in prompts * 5]))
        if len(index.match(0, prompts[0], boundaries)) != len(boundaries):
            raise RuntimeError("a boundary of the long prompt was not found")
        for owner, *_ in inserted:
            index.remove(owner)
    return {"long_insert": latencies(inserts), "long_match": latencies(matches)}


def _compare(sizes: Sizes) -> dict[str, Any]:
    """Look up known and unknown prompts, in the index and by comparison with every entry."""
    count = sizes.entries[0]
    known, unknown = _prompts(1, count), list(_prompts(6, sizes.num_compared))
    index = _filled(known)
    entries = {owner: tuple(prompt.tolist()) for owner, prompt in enumerate(known, 1)}
    index_times, comparison_times, same = [], [], True
    rng = np.random.default_rng(5)
    for _ in range(sizes.repeats):
        wanted = list(known[rng.integers(0, count, sizes.num_compared)]) + unknown
        arguments = [(0, prompt, BOUNDARIES) for prompt in wanted]
        index_times.append(time_calls(index.match, arguments))
        plain = [(entries, tuple(prompt.tolist())) for prompt in wanted]
        comparison_times.append(time_calls(owners_by_comparison, plain))
        for prompt, (_, ids) in zip(wanted, plain, strict=True):
            found = [owner for _, owners in index.match(0, prompt, BOUNDARIES) for owner in owners]
            same = same and found == owners_by_comparison(entries, ids)
    return {
        "entries": count,
        "index_us": latencies(index_times)["p50_us"],
        "comparison_us": latencies(comparison_times)["p50_us"],
        "same_answers": same,
    }


def owners_by_comparison(entries: dict[int, tuple[int, ...]], prompt: tuple[int, ...]) -> list[int]:
    """Owners of the entries that ``prompt`` begins with, found token by token."""
    owners = []
    for owner, entry in entries.items():
        shared = 0
        for ours, theirs in zip(entry, prompt, strict=False):
            if ours != theirs:
                break
            shared += 1
        if shared == len(entry):
            owners.append(owner)
    return owners
