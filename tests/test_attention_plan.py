"""The attention planner: a request's tokens are covered once, shared runs by one entry for all who share."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_plan_harness import BLOCK, Plan, covered, make_tables, trees
from parrot._core import AttentionPlanner


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    trees(),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 300),
    st.booleans(),
    st.sampled_from([16, 64]),
    st.sampled_from([{}, {"entry_tokens": 0, "own_entry_tokens": 0, "row_tokens": 0}]),
)
def test_every_token_of_every_request_is_read_exactly_once(tree, group, workers, share, min_shared, costs):
    requests, lens = tree
    plan = Plan(
        make_tables(requests),
        lens,
        group_size=group,
        num_kv_heads=2,
        num_workers=workers,
        share=share,
        min_shared_tokens=min_shared,
        min_chunk_tokens=64,
        **costs,
    )
    spans = covered(plan)
    for request, length in enumerate(lens):
        position = 0
        for begin, end in spans[request]:
            assert begin == position < end
            position = end
        assert position == length
    for rep, begin, end, members, part in plan.entries:
        assert len(members) * group <= 64
        assert members[0] == (rep, part)
        blocks = slice(begin // BLOCK, -(-end // BLOCK))
        assert all(requests[request][blocks] == requests[rep][blocks] for request, _ in members)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees(), st.integers(1, 64))
def test_parts_of_a_request_are_its_own_and_numbered_in_a_row(tree, workers):
    requests, lens = tree
    plan = Plan(make_tables(requests), lens, num_workers=workers, min_chunk_tokens=64)
    parts = defaultdict(list)
    for _, _, _, members, _ in plan.entries:
        for request, part in members:
            parts[request].append(part)
    for request in range(len(lens)):
        first, last = plan.part_begin[request], plan.part_begin[request + 1]
        expected = [-1] if last - first == 1 else list(range(first, last))
        assert sorted(parts[request]) == expected
    assert plan.num_parts == plan.part_begin[-1]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(trees(), st.integers(1, 300), st.booleans(), st.data())
def test_a_planner_that_goes_on_plans_as_a_new_one_does(tree, workers, share, data):
    requests, lens = tree
    next_block = 20_000
    planner = AttentionPlanner()
    options = {"num_workers": workers, "num_kv_heads": 2, "min_chunk_tokens": 64}
    for _ in range(data.draw(st.integers(1, 8))):
        change = data.draw(st.sampled_from(["grow", "grow", "grow", "shrink", "leave", "move", "share"]))
        which = data.draw(st.integers(0, len(lens) - 1))
        if change == "shrink":
            lens[which] = data.draw(st.integers(1, lens[which]))
            del requests[which][lens[which] // BLOCK :]  # what it wrote behind that goes elsewhere
        elif change == "leave" and len(lens) > 1:
            del requests[which], lens[which]
        elif change == "move":  # preempted and computed again elsewhere
            requests[which] = [next_block + n for n in range(len(requests[which]))]
        elif change == "share":
            share = not share
        else:
            lens = [length + data.draw(st.integers(0, 40)) for length in lens]
        for request, length in zip(requests, lens, strict=True):
            while len(request) * BLOCK < length:
                request.append(next_block := next_block + 1)
        next_block += 1000
        tables = make_tables(requests)
        plan = Plan(tables, lens, planner, share=share, **options)
        new = Plan(tables, lens, share=share, **options)
        assert plan.entries == new.entries
        assert plan.part_begin.tolist() == new.part_begin.tolist()


def test_who_shares_what_is_looked_for_only_when_it_may_have_changed():
    prefix = list(range(40))
    requests = [[*prefix, *range(1000 * r, 1000 * r + 9)] for r in range(1, 5)]
    lens = [40 * BLOCK + 3] * 4
    planner = AttentionPlanner()
    for step in range(130):
        Plan(make_tables(requests), [length + step for length in lens], planner)
    assert planner.num_searches == 1
    requests[2][45] += 500  # in use by now
    plan = Plan(make_tables(requests), [length + 130 for length in lens], planner)
    assert planner.num_searches == 2
    assert any(len(members) == 4 for _, _, _, members, _ in plan.entries)
    Plan(make_tables(requests), [length + 129 for length in lens], planner)
    Plan(make_tables(requests[:3]), [length + 130 for length in lens[:3]], planner)
    assert planner.num_searches == 4


def test_a_refused_step_leaves_a_planner_as_good_as_new():
    prefix = list(range(8))
    requests = [[*prefix, 100, 101], [*prefix, 200, 201]]
    planner = AttentionPlanner()
    Plan(make_tables(requests), [130, 131], planner)
    broken = [[*requests[0][:-1], -1], requests[1]]
    for tables, lens in (
        (broken, [150, 150]),
        (requests, [150, 161]),
        ([[-1] * 10, requests[1]], [130, 131]),
    ):
        with pytest.raises(ValueError, match=r"block_tables\[0, \d\] = -1|seq_lens\[1\] = 161"):
            Plan(tables, lens, planner)
        assert Plan(requests, [149, 150], planner).entries == Plan(requests, [149, 150]).entries


def test_the_order_of_a_plan_does_not_depend_on_block_ids():
    requests = [[0, 1, 2, 3, 4, 10 + r % 3, 20 + r] for r in range(9)]
    renamed = [[1000 - block for block in request] for request in requests]
    lens = [7 * BLOCK] * 9
    assert (
        Plan(requests, lens, min_shared_tokens=16).entries
        == Plan(renamed, lens, min_shared_tokens=16).entries
    )


def test_a_shared_prefix_is_read_by_one_entry_per_tile_of_members():
    prefix = list(range(100))
    requests = [[*prefix, 1000 + i] for i in range(70)]
    plan = Plan(make_tables(requests), [100 * BLOCK + 5] * 70, num_workers=1, num_kv_heads=1)
    shared = [e for e in plan.entries if len(e[3]) > 1]
    assert [(e[1], e[2], len(e[3])) for e in shared] == [(0, 1600, 64), (0, 1600, 6)]
    assert all((e[1], e[2]) == (1600, 1605) for e in plan.entries if len(e[3]) == 1)


def test_a_run_too_short_to_share_is_left_to_each_request():
    requests = [[0, 1, 10 + i] for i in range(4)]
    plan = Plan(make_tables(requests), [40] * 4, min_shared_tokens=64)
    assert covered(plan) == {i: [(0, 40)] for i in range(4)}
    assert all(len(e[3]) == 1 for e in plan.entries)


def shared_lengths(members, prefix, **options):
    """Tokens that so many requests, which have the beginning in common, read together."""
    requests = [[*range(prefix), 1000 + i] for i in range(members)]
    plan = Plan(make_tables(requests), [prefix * BLOCK + 5] * members, num_workers=1, **options)
    return sum(end - begin for _, begin, end, entry, _ in plan.entries if len(entry) > 1 and entry[0][0] == 0)


@pytest.mark.parametrize(
    ("members", "group", "costs", "least"),
    [
        (2, 1, {}, 8),  # 2 * t > t + 110 + 2 * 5
        (3, 1, {}, 4),
        (2, 4, {}, 10),  # 2 * t > t + 110 + 2 * 20
        (16, 4, {}, 4),
        (64, 16, {}, 9),  # 64 * t > 16 * (t + 110) + 64 * 80
        (2, 1, {"entry_tokens": 0, "row_tokens": 0}, 4),
        (8, 1, {"entry_tokens": 4000}, 37),
    ],
)
def test_a_run_is_read_together_from_where_that_costs_less(members, group, costs, least):
    for prefix in (least - 1, least):
        together = shared_lengths(members, prefix, group_size=group, **costs)
        assert together == (prefix * BLOCK if prefix == least else 0)


def test_an_entry_with_room_for_one_request_is_no_reason_to_share():
    assert shared_lengths(4, 500, group_size=64) == 0


def test_what_all_leave_alone_is_shared_by_those_who_have_more_in_common():
    requests = [[0, 1, 2, 3, 10, 11, 12, 13, 100 + i] for i in range(2)] + [[0, 1, 2, 3, 200]]
    plan = Plan([*requests[:2], requests[2] + [-1] * 4], [140, 140, 70], num_workers=1, entry_tokens=115)
    assert [(e[1], e[2]) for e in plan.entries if len(e[3]) > 1] == [(0, 128)]


def test_long_work_is_split_over_idle_workers():
    alone = Plan(make_tables([list(range(1000))]), [16000], num_workers=64)
    assert 32 <= len(alone.entries) <= 64
    crowd = Plan(make_tables([[i] for i in range(64)]), [16] * 64, num_workers=64)
    assert len(crowd.entries) == 64


@pytest.mark.parametrize(
    ("tables", "lens", "options", "message"),
    [
        ([[0, 1]], [0], {}, r"seq_lens\[0\] = 0 is outside \[1, 32\]"),
        ([[0, 1]], [33], {}, r"seq_lens\[0\] = 33"),
        ([[0, -1]], [17], {}, r"block_tables\[0, 1\] = -1"),
        ([[0]], [1], {"group_size": 65}, "max_rows"),
        ([[0]], [1], {"num_workers": 0}, "positive"),
        ([[0]], [1], {"row_tokens": -1}, "row_tokens = -1"),
        ([[0]], [1], {"entry_tokens": -1}, "plan_attention: entry_tokens = -1"),
        ([[0]], [1], {"own_entry_tokens": -2}, "own_entry_tokens = -2"),
    ],
)
def test_bad_input_is_named(tables, lens, options, message):
    with pytest.raises(ValueError, match=message):
        Plan(tables, lens, **options)


GQA = {"group_size": 4, "num_kv_heads": 8, "num_workers": 264}


def shared_and_own(num_requests, prefix, own, **options):
    """Numbers of entries that a prefix of 16 * ``prefix`` tokens and each request's 16 * ``own`` are cut into
    on a large GPU, by the requests that read them: all of one kind are cut alike."""
    requests = [[*range(prefix), *range(10_000 * i, 10_000 * i + own)] for i in range(1, num_requests + 1)]
    plan = Plan(make_tables(requests), [(prefix + own) * BLOCK] * num_requests, **GQA | options)
    counts = [0, 0]
    for _, begin, _, members, _ in plan.entries:
        if members[0][0] == 0:
            assert (len(members) > 1) == (begin < prefix * BLOCK)
            counts[begin >= prefix * BLOCK] += 1
    return counts


def test_what_is_shared_and_what_is_not_are_cut_to_lengths_of_their_own():
    shared, own = shared_and_own(32, 375, 16)
    assert shared > 4
    assert own == 2  # of four tiles, where one length for both would leave them whole
    shared, own = shared_and_own(64, 375, 64)
    assert 94 / shared > 2 * 16 / own > 2


def test_entries_that_all_start_at_once_are_not_cut_for_fear_of_late_ones():
    shared, own = shared_and_own(8, 375, 16)
    assert shared > 16
    assert (shared + 8) * GQA["num_kv_heads"] <= GQA["num_workers"]
    assert own == 1


def test_requests_that_share_nothing_are_not_cut_for_fear_of_late_entries():
    assert shared_and_own(64, 0, 65) == [0, 1]


COSTS = ("entry_tokens", "own_entry_tokens", "row_tokens")


@pytest.mark.parametrize("costs", [(110, 5, 5), (0, 5, 5), (110, 500, 5), (110, 5, 60)])
@pytest.mark.parametrize(("requests", "own_tiles"), [(16, 4), (32, 4), (64, 16)])
def test_no_other_pair_of_lengths_is_done_much_sooner(requests, own_tiles, costs):
    """Entries longest first to the least loaded worker; a request's own ones end 40 % of one late."""

    def pieces(tiles, count):
        return [-(-tiles // count)] * (tiles // -(-tiles // count)) + [tiles % -(-tiles // count)]

    def time(shared_count, own_count):
        rows = [min(16, requests)] * (requests // 16)
        shared = [64 * n + costs[0] + 4 * r * costs[2] for n in pieces(94, shared_count) if n for r in rows]
        own = [64 * n + costs[1] + 4 * costs[2] for n in pieces(own_tiles, own_count) if n]
        entries = sorted((shared + own * requests) * 8, reverse=True)
        loads = [0] * 264
        for entry in entries:
            heapq.heapreplace(loads, loads[0] + entry)
        return max(loads) + (0.4 * max(own) if len(entries) > len(loads) else 0)

    chosen = time(*shared_and_own(requests, 375, 4 * own_tiles, **dict(zip(COSTS, costs, strict=True))))
    best = min(time(s, o) for s in range(1, 25) for o in range(1, own_tiles // 2 + 1))
    assert chosen <= 1.03 * best


def test_the_largest_block_that_is_read_is_known():
    planner = AttentionPlanner()
    assert planner.max_block == -1
    Plan([[3, 9, 70], [3, 8, 70]], [32, 20], planner)
    assert planner.max_block == 9
    Plan([[3, 9, 70], [3, 8, 70]], [33, 20], planner)
    assert planner.max_block == 70
    Plan([[3, 9, 70], [3, 8, 70]], [32, 20], planner)
    assert planner.max_block == 9
    with pytest.raises(ValueError, match=r"block_tables\[1, 2\] = -1"):
        Plan([[3, 9, 95], [3, 8, -1]], [33, 33], planner)
    Plan([[3, 9, -1], [3, 8, -1]], [32, 20], planner)
    assert planner.max_block == 9


@pytest.mark.parametrize(
    "option",
    [
        "num_kv_heads",
        "num_workers",
        "max_rows",
        "min_shared_tokens",
        "min_chunk_tokens",
        "entry_tokens",
        "own_entry_tokens",
        "row_tokens",
    ],
)
def test_the_largest_options_overflow_nothing(option):
    plan = Plan([[0, 1, 2], [0, 1, 3]], [48, 35], **{option: 2**31 - 1})
    assert {r: spans[0][0] for r, spans in covered(plan).items()} == {0: 0, 1: 0}
    assert sorted(spans[-1][1] for spans in covered(plan).values()) == [35, 48]


def test_a_request_of_the_largest_length_is_covered_to_its_end():
    plan = Plan([[0]], [2**31 - 1], block_size=2**31 - 1, min_chunk_tokens=2**31 - 1)
    assert covered(plan) == {0: [(0, 2**31 - 1)]}


def test_a_plan_without_room_is_refused_before_it_is_made():
    huge = {"block_size": 2**31 - 1, "num_workers": 2**31 - 1, "min_chunk_tokens": 1}
    begun = time.process_time()
    with pytest.raises(ValueError, match=r"entries has room for 32768 int32, the plan needs 268435456$"):
        Plan([[0]], [2**31 - 1], **huge)
    assert time.process_time() - begun < 1, "33 million entries take 4 s"
    tables, lens = np.zeros((2, 4), dtype=np.int32), np.array([64, 64], dtype=np.int32)
    room = [np.zeros((8, 8), dtype=np.int32), np.zeros((1, 2), dtype=np.int32), np.zeros(3, dtype=np.int32)]
    planner, sizes = (
        AttentionPlanner(),
        {"group_size": 1, "num_kv_heads": 1, "num_workers": 1, "entry_tokens": 0},
    )
    with pytest.raises(ValueError, match=r"members has room for 2 int32, the plan needs 4$"):
        planner.plan(tables, lens, *room, **sizes)
    room[1] = np.zeros((2, 2), dtype=np.int32)
    assert planner.plan(tables, lens, *room, **sizes)[:2] == (1, 2)


def test_work_that_64_bits_cannot_count_is_refused():
    """The sums of what many heads read of long requests went below zero, and entries were placed for ever."""
    huge = {"block_size": 2**30, "num_kv_heads": 2**31 - 1, "num_workers": 1}
    plan = Plan([[0]], [2**20], **huge)
    assert len(plan.entries) >= 1
    for lens in ([2**31 - 1] * 2, [10**9] * 9, [10**6] * 10_000):
        tables = [[2 * i, 2 * i + 1] for i in range(len(lens))]
        for num_workers in (1, 132):
            with pytest.raises(ValueError, match="the lengths of all requests times num_kv_heads"):
                Plan(tables, lens, **{**huge, "num_workers": num_workers})


def test_buffers_too_small_and_wrong_dtypes_are_refused():
    tables, lens = np.zeros((2, 3), dtype=np.int32), np.array([5, 5], dtype=np.int32)
    buffers = [
        np.zeros((8, 8), dtype=np.int32),
        np.zeros((8, 2), dtype=np.int32),
        np.zeros(3, dtype=np.int32),
    ]
    sizes = {"group_size": 1, "num_kv_heads": 1, "num_workers": 1, "entry_tokens": 0}
    with pytest.raises(ValueError, match="part_begin has room for 1 int32, the plan needs 3"):
        AttentionPlanner().plan(tables, lens, *buffers[:2], np.zeros(1, dtype=np.int32), **sizes)
    with pytest.raises(ValueError, match=r"block_tables must be \[n, max_blocks\]"):
        AttentionPlanner().plan(tables, lens[:1], *buffers, **sizes)
    with pytest.raises(TypeError):
        AttentionPlanner().plan(tables.astype(np.int64), lens, *buffers, **sizes)


def test_requests_that_read_together_are_counted_once_each():
    planner = AttentionPlanner()
    prefix, deeper = list(range(8)), list(range(8, 16))
    requests = [[*prefix, *deeper, 100], [*prefix, *deeper, 101], [*prefix, 102], [103]]
    lens = [16 * BLOCK + 3, 16 * BLOCK + 1, 8 * BLOCK + 1, 7]
    Plan(make_tables(requests), lens, planner)
    assert planner.num_sharing == 3
    Plan(make_tables(requests), [length + 1 for length in lens], planner)
    assert planner.num_sharing == 3
    free = {"entry_tokens": 0, "row_tokens": 0}
    Plan(make_tables(requests), lens, planner, group_size=32, **free)  # two an entry: the third is alone
    assert planner.num_sharing == 2
    Plan(make_tables(requests), lens, planner, share=False)
    assert planner.num_sharing == 0
