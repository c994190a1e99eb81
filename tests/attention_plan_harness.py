"""Plans of the attention planner by the names of their fields, and random trees of requests."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import strategies as st

from parrot._core import AttentionPlanner

BLOCK = 16


class Plan:
    """A plan's buffers, with the fields by name; made by ``planner``, or by a new one."""

    def __init__(self, tables, lens, planner=None, **options):
        tables, lens = np.array(tables, dtype=np.int32), np.array(lens, dtype=np.int32)
        entries = np.zeros((4096, 8), dtype=np.int32)
        members = np.zeros((65536, 2), dtype=np.int32)
        self.part_begin = np.zeros(len(lens) + 1, dtype=np.int32)
        defaults = {"group_size": 1, "num_kv_heads": 1, "num_workers": 8}
        planner = planner or AttentionPlanner()
        num_entries, num_members, self.num_parts = planner.plan(
            tables, lens, entries, members, self.part_begin, **(defaults | options)
        )
        self.entries = [
            (rep, begin, end, [tuple(m) for m in members[first : first + count].tolist()], part)
            for rep, begin, end, first, count, part, _, _ in entries[:num_entries].tolist()
        ]
        assert num_members == sum(len(e[3]) for e in self.entries)


def covered(plan):
    """request -> sorted token ranges of its entries."""
    ranges = defaultdict(list)
    for _, begin, end, members, _ in plan.entries:
        for request, _ in members:
            ranges[request].append((begin, end))
    return {request: sorted(spans) for request, spans in ranges.items()}


def make_tables(paths):
    """Block tables from lists of block ids, -1 past the end."""
    width = max(map(len, paths))
    return [path + [-1] * (width - len(path)) for path in paths]


@st.composite
def trees(draw):
    """Requests that descend a random tree of blocks."""
    paths, lens, next_block = [[]], [], iter(range(10_000))
    for _ in range(draw(st.integers(1, 5))):
        base = draw(st.sampled_from(paths))
        paths.append(base + [next(next_block) for _ in range(draw(st.integers(1, 12)))])
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        length = draw(st.integers(1, 100))
        own = [next(next_block) for _ in range(-(-length // BLOCK))]
        base = draw(st.sampled_from(paths))
        requests.append(base + own)
        lens.append(len(base) * BLOCK + length)
    return requests, lens
