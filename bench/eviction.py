"""Graph-aware eviction against LRU and the offline optimum, on the multi-agent application of figure 18.

A trace of calls that begin and end is replayed on a real context tree. *Missed* tokens are those computed
again because their KV was evicted: all tokens computed less the distinct ones. The cache that a trace needs
is the smallest one in which LRU misses next to none; every policy then gets a part of it. A part too small
for the calls that run at once is left out. The optimum knows the trace: it keeps what is used again soonest,
in order of the calls' beginnings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from parrot._core import OutOfBlocks
from parrot.manager.prompt_trie import NO_USE, NextUse, PromptTrie

from .context_builder import BLOCK, Builder, Ids
from .multi_agent import AgentCall, Event, Layout, Schedule, application
from .timing import Spread, of_repeats, print_table, show, spread

Policy = Literal["lru", "graph", "optimum"]
POLICIES: tuple[Policy, ...] = ("lru", "graph", "optimum")
LAYOUTS: tuple[Layout, ...] = ("role first", "history first")
NEXT_TO_NONE = 0.001  # of a trace's tokens
TARGET = 0.7  # of LRU's missed tokens, at half the cache


@dataclass(frozen=True, slots=True)
class Sizes:
    """Applications per trace, ``batch`` calls at once, ``interval`` decode steps between arrivals."""

    files: tuple[int, ...] = (4, 8, 12, 16)
    parts: tuple[float, ...] = (0.375, 0.5, 0.625, 0.75)
    num_applications: int = 4
    batch: int = 8
    interval: float = 500.0
    seeds: int = 5


FULL = Sizes()
QUICK = Sizes(files=(4, 16), parts=(0.5,), seeds=2)


def run(quick: bool) -> dict[str, Any]:
    """Replay every trace and print what each policy missed."""
    return measure(QUICK if quick else FULL)


def measure(sizes: Sizes) -> dict[str, Any]:
    """All traces at ``sizes``; ok: at half the cache the graph saves what it must, over all traces."""
    rows = [_row(layout, files, sizes) for layout in LAYOUTS for files in sizes.files]
    for layout in LAYOUTS:
        _print(layout, [row for row in rows if row["layout"] == layout], sizes)
    half = [row["parts"]["0.5"] for row in rows if "0.5" in row["parts"]]
    missed = {policy: sum(part[policy]["median"] for part in half) for policy in POLICIES}
    saved = 1 - missed["graph"] / missed["lru"] if missed["lru"] else 0.0
    print(f"at half the cache the graph saves {saved:.0%} of LRU's missed tokens, over all traces together")
    return {"rows": rows, "saved_at_half": round(saved, 4), "ok": saved >= 1 - TARGET}


def _row(layout: Layout, files: int, sizes: Sizes) -> dict[str, Any]:
    """One layout and number of files; parts of the cache too small for the calls that run are left out."""
    needs: list[float] = []
    missed: dict[float, dict[Policy, list[int]]] = {part: {p: [] for p in POLICIES} for part in sizes.parts}
    for seed in range(sizes.seeds):
        applications = [application(n, files, layout) for n in range(sizes.num_applications)]
        schedule = Schedule(applications, batch=sizes.batch, interval=sizes.interval, seed=seed)
        trace = Trace(list(schedule.events()))
        needed = trace.blocks_needed()
        needs.append(needed * BLOCK)
        for part in sizes.parts:
            for policy in POLICIES:
                tokens = trace.missed(round(needed * part), policy)
                if tokens is not None:
                    missed[part][policy].append(tokens)
    return {
        "layout": layout,
        "files": files,
        "needed_tokens": spread(needs),
        "parts": {
            str(part): {policy: spread(figures) for policy, figures in by_policy.items()}
            for part, by_policy in missed.items()
            if len(by_policy["lru"]) == sizes.seeds
        },
    }


def _print(layout: Layout, rows: Iterable[dict[str, Any]], sizes: Sizes) -> None:
    cells = []
    for row in rows:
        for part, figures in row["parts"].items():
            lru, graph = figures["lru"]["median"], figures["graph"]["median"]
            saved = f"{1 - graph / lru:.0%}" if lru else "-"
            shown: list[Spread] = [figures[policy] for policy in POLICIES]
            cells.append((str(row["files"]), part, *(show(figure, 0) for figure in shown), saved))
    print_table(
        f"{layout}: missed tokens of {sizes.num_applications} applications; {of_repeats(sizes.seeds)}",
        ("files", "of the cache", "LRU", "graph", "optimum", "saved"),
        cells,
    )


class Trace:
    """A fixed sequence of events, to be replayed on caches of any size."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.prompts: dict[AgentCall, Ids] = {}
        self.beginnings: dict[tuple[Hashable, ...], list[int]] = {}  # of each prefix, in order
        self.num_distinct = sum(event.call.num_output for event in events if event.begins)
        known: dict[Hashable, Ids] = {}
        for event in events:
            if event.begins:
                self._take(event.call, known)

    def _take(self, call: AgentCall, known: dict[Hashable, Ids]) -> None:
        for segment in call.segments:
            if segment.key not in known:
                known[segment.key] = segment.tokens()
        for end in range(1, len(call.keys) + 1):
            begun = self.beginnings.setdefault(call.keys[:end], [])
            if not begun:
                self.num_distinct += call.segments[end - 1].length
            begun.append(len(self.prompts))
        self.prompts[call] = np.concatenate([known[segment.key] for segment in call.segments])

    def missed(self, num_blocks: int, policy: Policy) -> int | None:
        """Tokens computed again; None if the calls that run do not fit."""
        try:
            return Replay(self, num_blocks, policy).run() - self.num_distinct
        except OutOfBlocks:
            return None

    def blocks_needed(self) -> int:
        """The smallest cache in which LRU misses next to nothing, to within a hundredth."""
        low, high = 1, 2 * self.num_distinct // BLOCK
        while high - low > high // 100:
            middle = (low + high) // 2
            missed = self.missed(middle, "lru")
            if missed is None or missed > NEXT_TO_NONE * self.num_distinct:
                low = middle + 1
            else:
                high = middle
        return high


class Replay:
    """One trace on one tree under one policy."""

    def __init__(self, trace: Trace, num_blocks: int, policy: Policy) -> None:
        self._trace = trace
        self._policy = policy
        self._builder = Builder(num_blocks)
        self._num_begun = self._num_computed = 0
        self._ids = {call: number for number, call in enumerate(trace.prompts, 1)}
        self._cached: dict[int, dict[AgentCall, None]] = {}  # of running applications
        self._known: dict[AgentCall, NextUse] = {}  # what the tree was told
        self._unfinished: dict[int, dict[AgentCall, None]] = {}
        self._tries: dict[int, PromptTrie[AgentCall]] = {}
        for call in sorted(trace.prompts, key=lambda call: call.stage):
            self._unfinished.setdefault(call.application, {})[call] = None
            self._tries.setdefault(call.application, PromptTrie()).add(call, call.keys)

    def run(self) -> int:
        """Replay all events; returns how many tokens were computed."""
        for event in self._trace.events:
            if event.begins:
                self._begin(event.call)
            else:
                self._end(event.call)
            if self._policy == "optimum":
                for calls in self._cached.values():
                    self._tell({call: self._next_beginning(call) for call in calls})
        self._builder.tree.check_invariants()
        return self._num_computed

    def _begin(self, call: AgentCall) -> None:
        prompt = self._trace.prompts[call]
        matched = self._builder.tree.open(self._ids[call], 0, prompt, len(prompt) - 1)
        self._builder.extend(self._ids[call], prompt[matched:])
        self._num_computed += len(prompt) - matched
        self._num_begun += 1

    def _end(self, call: AgentCall) -> None:
        number, tree = call.application, self._builder.tree
        self._builder.extend(self._ids[call], self._builder.text(call.num_output))
        self._num_computed += call.num_output
        tree.release(self._ids[call])
        self._cached.setdefault(number, {})[call] = None
        del self._unfinished[number][call]
        self._tries[number].remove(call, call.keys)
        if not self._unfinished[number]:
            for ended in self._cached.pop(number):
                tree.free(self._ids[ended])
        elif self._policy == "graph":
            steps: dict[AgentCall, int] = {}
            trie = self._tries[number]
            uses = {
                cached: trie.next_use(cached.keys, lambda call: self._steps_to(call, steps))
                for cached in self._cached[number]
            }
            self._tell(uses)

    def _steps_to(self, call: AgentCall, known: dict[AgentCall, int]) -> int:
        """Distance in the graph from what runs or could run: all that a manager knows."""
        if call not in known:
            waits = [need for need in call.needs if need in self._unfinished[call.application]]
            known[call] = 1 + max(self._steps_to(need, known) for need in waits) if waits else 0
        return known[call]

    def _next_beginning(self, call: AgentCall) -> NextUse:
        """The longest prefix that is used again in this trace, and after how many calls begin."""
        for end in range(len(call.keys), 0, -1):
            begun = self._trace.beginnings[call.keys[:end]]
            place = bisect_left(begun, self._num_begun)
            if place < len(begun):
                return NextUse(end, 1, begun[place])
        return NO_USE

    def _tell(self, uses: dict[AgentCall, NextUse]) -> None:
        """Pass on what changed."""
        news = {call: use for call, use in uses.items() if self._known.get(call) != use}
        if not news:
            return
        self._known.update(news)
        self._builder.tree.set_uses(
            np.array([self._ids[call] for call in news], np.int64),
            np.array([call.prefix_length(use.num_parts) for call, use in news.items()], np.int32),
            np.array([use.remaining_uses for use in news.values()], np.int32),
            np.array([use.steps for use in news.values()], np.int32),
        )
