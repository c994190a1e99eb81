"""Objective deduction and task groups, on the shapes that applications have (paper section 5.2, figure 9)."""

from __future__ import annotations

import time

import pytest

from deduction_harness import deduced, depths, groups, latency_calls
from graph_builder import finish, flow_call, join, make_graph, prompt_call, submit, value
from machine import slowness
from parrot import api
from parrot.errors import EngineError
from parrot.manager.analysis import deduce
from parrot.manager.graph import Graph


def test_figure_9() -> None:
    graph = deduced(
        *[flow_call(f"P{i}", [], [f"p{i}"]) for i in range(3)],
        *[flow_call(f"Q{i}", [], [f"q{i}"]) for i in range(4)],
        flow_call("R3", [], ["r3"]),
        flow_call("R1", ["r3", "p0", "p1", "p2"], ["r1"]),
        flow_call("R2", ["r3", "q0", "q1", "q2", "q3"], ["r2"]),
        labels={"r1": "LATENCY", "r2": "LATENCY"},
    )
    assert latency_calls(graph) == {"R1", "R2", "R3"}
    assert groups(graph) == {0: {"P0", "P1", "P2"}, 1: {"Q0", "Q1", "Q2", "Q3"}}


def test_unlabelled_calls_are_throughput_without_group_or_depth() -> None:
    graph = deduced(flow_call("A", [], ["a"]), flow_call("B", ["a"], ["b"]), labels={})
    assert latency_calls(graph) == set()
    assert groups(graph) == {}
    assert depths(graph) == {"A": None, "B": None}


def test_a_chain_is_latency_throughout() -> None:
    graph = deduced(
        flow_call("A", [], ["a"]),
        flow_call("B", ["a"], ["b"]),
        flow_call("C", ["b"], ["c"]),
        flow_call("Stranger", [], ["s"]),
        labels={"c": "LATENCY"},
    )
    assert latency_calls(graph) == {"A", "B", "C"}
    assert depths(graph) == {"A": 2, "B": 1, "C": 0, "Stranger": None}


def test_the_maps_of_a_map_reduce_are_one_group() -> None:
    maps = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(5)]
    graph = deduced(*maps, flow_call("R", [f"m{i}" for i in range(5)], ["r"]), labels={"r": "LATENCY"})
    assert latency_calls(graph) == {"R"}
    assert groups(graph) == {0: {f"M{i}" for i in range(5)}}


def test_derived_variables_are_transparent() -> None:
    maps = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(3)]
    graph = deduced(
        *maps,
        flow_call("R", ["j"], ["r"]),
        labels={"final": "LATENCY"},
        variables=[join("s0", "m0"), join("j", "s0", "m1", "m2"), join("final", "r")],
    )
    assert latency_calls(graph) == {"R"}
    assert groups(graph) == {0: {"M0", "M1", "M2"}}
    assert depths(graph) == {"M0": 1, "M1": 1, "M2": 1, "R": 0}


def test_a_labelled_join_is_a_group_and_a_labelled_strip_is_latency() -> None:
    calls = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(3)]
    joined = deduced(*calls, labels={"j": "LATENCY"}, variables=[join("j", "m0", "m1", "m2")])
    assert groups(joined) == {0: {"M0", "M1", "M2"}}
    stripped = deduced(calls[0], labels={"j": "LATENCY"}, variables=[join("j", "m0")])
    assert latency_calls(stripped) == {"M0"}


def coders_and_reviewers(count: int) -> list[api.CallBody]:
    codes = [f"code{i}" for i in range(count)]
    return [
        flow_call("Plan", [], ["plan"]),
        *[flow_call(f"Coder{i}", ["plan"], [f"code{i}"]) for i in range(count)],
        *[flow_call(f"Reviewer{i}", codes, [f"review{i}"]) for i in range(count)],
    ]


def test_coders_each_read_by_all_reviewers_are_one_group() -> None:
    reviews = {f"review{i}": "LATENCY" for i in range(3)}
    graph = deduced(*coders_and_reviewers(3), labels=reviews)  # type: ignore[arg-type]
    assert groups(graph) == {0: {"Coder0", "Coder1", "Coder2"}}
    assert latency_calls(graph) == {"Plan", "Reviewer0", "Reviewer1", "Reviewer2"}

    final = flow_call("Final", list(reviews), ["final"])
    graph = deduced(*coders_and_reviewers(3), final, labels={"final": "LATENCY"})
    assert sorted(groups(graph).values(), key=min) == [
        {"Coder0", "Coder1", "Coder2"},
        {"Reviewer0", "Reviewer1", "Reviewer2"},
    ]
    assert latency_calls(graph) == {"Plan", "Final"}
    assert depths(graph)["Plan"] == 3


def test_consumers_that_overlap_in_a_chain_make_one_group() -> None:
    graph = deduced(
        *[flow_call(f"M{i}", [], [f"m{i}"]) for i in range(4)],
        *[flow_call(f"R{i}", [f"m{i}", f"m{i + 1}"], [f"r{i}"]) for i in range(3)],
        flow_call("Apart", [], ["apart"]),
        flow_call("R9", ["apart"], ["r9"]),
        flow_call("F", ["r0", "r1", "r2", "r9"], ["f"]),
        labels={"f": "LATENCY"},
    )
    assert sorted(groups(graph).values(), key=min) == [{"M0", "M1", "M2", "M3"}, {"R0", "R1", "R2", "R9"}]
    assert latency_calls(graph) == {"F", "Apart"}


def test_the_arms_of_a_diamond_are_a_group_and_its_ends_are_latency() -> None:
    graph = deduced(
        flow_call("A", [], ["a"]),
        flow_call("B", ["a"], ["b"]),
        flow_call("C", ["a"], ["c"]),
        flow_call("D", ["b", "c"], ["d"]),
        labels={"d": "LATENCY"},
    )
    assert latency_calls(graph) == {"A", "D"}
    assert groups(graph) == {0: {"B", "C"}}


def test_predecessors_at_unequal_depths_are_not_grouped() -> None:
    graph = deduced(
        flow_call("A", [], ["a"]),
        flow_call("B", ["a"], ["b"]),
        flow_call("C", ["a", "b"], ["c"]),
        labels={"c": "LATENCY"},
    )
    assert latency_calls(graph) == {"A", "B", "C"}
    assert depths(graph) == {"A": 2, "B": 1, "C": 0}


def test_depth_is_the_longest_path_to_a_labelled_variable() -> None:
    graph = deduced(
        flow_call("A", [], ["a"]),
        flow_call("B", ["a"], ["b"]),
        flow_call("C", ["b"], ["c"]),
        labels={"a": "LATENCY", "c": "LATENCY"},
    )
    assert depths(graph) == {"A": 2, "B": 1, "C": 0}
    assert latency_calls(graph) == {"A", "B", "C"}


def test_a_labelled_producer_leaves_its_group() -> None:
    maps = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(3)]
    graph = deduced(
        *maps, flow_call("R", ["m0", "m1", "m2"], ["r"]), labels={"r": "LATENCY", "m1": "LATENCY"}
    )
    assert latency_calls(graph) == {"R", "M1"}
    assert groups(graph) == {0: {"M0", "M2"}}


def test_throughput_marks_ancestors_and_latency_is_stricter() -> None:
    calls = (flow_call("A", [], ["a"]), flow_call("B", ["a"], ["b"]), flow_call("C", ["a"], ["c"]))
    graph = deduced(*calls, labels={"b": "THROUGHPUT"})
    assert latency_calls(graph) == set()
    assert depths(graph) == {"A": 1, "B": 0, "C": None}
    graph = deduced(*calls, labels={"b": "THROUGHPUT", "c": "LATENCY"})
    assert latency_calls(graph) == {"A", "C"}
    graph = deduced(*calls, labels={"a": "LATENCY", "b": "THROUGHPUT"})
    assert latency_calls(graph) == {"A"}
    assert depths(graph) == {"A": 0, "B": 0, "C": None}


def test_a_later_label_upgrades_what_has_not_finished() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["a"]), flow_call("B", ["a"], ["b"]), flow_call("C", ["b"], ["c"]))
    assert deduce(graph) == []
    finish(graph, "A", "v")
    graph.label("c", "THROUGHPUT")
    deduce(graph)
    assert latency_calls(graph) == set()
    graph.label("c", "LATENCY")
    changed = deduce(graph)
    assert {call.request_id for call in changed} == latency_calls(graph) == {"B", "C"}
    assert deduce(graph) == []


def test_a_label_may_come_before_the_producer() -> None:
    graph = deduced(labels={"x": "LATENCY"}, variables=[value("x")])
    submit(graph, flow_call("A", [], ["x"]))
    deduce(graph)
    assert latency_calls(graph) == {"A"}


def test_a_call_may_carry_its_objective() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["a"]), flow_call("B", ["a"], ["b"], objective="LATENCY"))
    deduce(graph)
    assert latency_calls(graph) == {"A", "B"}


def test_a_group_stays_one_while_its_members_finish() -> None:
    maps = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(3)]
    graph = deduced(*maps, flow_call("R", ["m0", "m1", "m2"], ["r"]), labels={"r": "LATENCY"})
    finish(graph, "M0", "v")
    finish(graph, "M1", "v")
    submit(graph, flow_call("X", [], ["x"]), labels={"x": "LATENCY"})
    assert [call.request_id for call in deduce(graph)] == ["X"]
    assert groups(graph) == {0: {"M0", "M1", "M2"}}


def test_the_halves_of_a_split_group_get_different_numbers() -> None:
    graph = deduced(
        *[flow_call(f"M{i}", [], [f"m{i}"]) for i in range(4)],
        flow_call("R1", ["m0", "m1"], ["r1"]),
        flow_call("R2", ["m2", "m3"], ["r2"]),
        flow_call("All", ["m0", "m1", "m2", "m3"], ["all"]),
        labels={"r1": "LATENCY", "r2": "LATENCY", "all": "LATENCY"},
    )
    assert groups(graph) == {0: {"M0", "M1", "M2", "M3"}}
    graph.cancel("all")
    graph.is_stale = True
    deduce(graph)
    assert groups(graph) == {0: {"M0", "M1"}, 1: {"M2", "M3"}}


def test_groups_of_later_submits_get_new_numbers() -> None:
    graph = make_graph()
    for name in ("a", "b"):
        submit(
            graph,
            *[flow_call(f"{name}{i}", [], [f"v{name}{i}"]) for i in range(2)],
            flow_call(f"{name}R", [f"v{name}0", f"v{name}1"], [f"{name}r"]),
            labels={f"{name}r": "LATENCY"},
        )
        deduce(graph)
    assert groups(graph) == {0: {"a0", "a1"}, 1: {"b0", "b1"}}


def test_a_loop_of_calls_is_latency_step_by_step() -> None:
    graph = deduced(
        prompt_call("A", "{{output:draft}}{{input:review}}{{output:final}}"),
        flow_call("B", ["draft"], ["review"]),
        labels={"final": "LATENCY"},
    )
    assert latency_calls(graph) == {"A", "B"}
    assert depths(graph) == {"A": 2, "B": 1}


def test_calls_without_a_way_to_the_label_are_left_alone() -> None:
    graph = deduced(
        flow_call("A", [], ["a"]),
        flow_call("B", ["a"], ["b"]),
        flow_call("After", ["b"], ["after"]),
        labels={"b": "LATENCY"},
    )
    graph.fail(graph.live["A"], EngineError("boom").to_info())
    graph.is_stale = True
    assert deduce(graph) == []
    assert latency_calls(graph) == {"A", "B"}


def test_calls_that_think_before_they_answer_are_a_group_too() -> None:
    coders = [prompt_call(f"C{i}", f"{{{{output:thought{i}}}}} {{{{output:code{i}}}}}") for i in range(4)]
    graph = deduced(
        *coders, flow_call("R", [f"code{i}" for i in range(4)], ["result"]), labels={"result": "LATENCY"}
    )
    assert latency_calls(graph) == {"R"}
    assert list(groups(graph).values()) == [{"C0", "C1", "C2", "C3"}]


def test_outputs_that_later_levels_read_leave_a_group_together() -> None:
    """Reviewers read the code, revisers the code, the notes of the coders and the reviews."""
    n = range(3)
    coders = [prompt_call(f"C{i}", f"{{{{output:code{i}}}}} {{{{output:note{i}}}}}") for i in n]
    reviewers = [flow_call(f"R{i}", [f"code{j}" for j in n], [f"review{i}"]) for i in n]
    read = [*(f"note{j}" for j in n), *(f"review{j}" for j in n)]
    revisers = [flow_call(f"V{i}", read, [f"revised{i}"]) for i in n]
    end = flow_call("E", [f"revised{j}" for j in n], ["result"])
    graph = deduced(*coders, *reviewers, *revisers, end, labels={"result": "LATENCY"})
    assert latency_calls(graph) == {"E"}
    assert sorted(map(sorted, groups(graph).values())) == [[f"{x}{i}" for i in n] for x in "CRV"]


@pytest.mark.usefixtures("garbage_at_rest")
def test_4096_calls_take_a_fraction_of_a_second() -> None:
    """About 50 ms where the limits were set, twice that for a deadline; in the square of them, seconds."""
    wide, narrow = range(4095), range(2047)
    all_v, all_w = join("j", *(f"v{i}" for i in wide)), join("k", *(f"w{i}" for i in narrow))
    half_v = join("j", *(f"v{i}" for i in narrow))
    maps = [flow_call(f"M{i}", [], [f"v{i}"]) for i in wide]
    chain = [flow_call(f"C{i}", [f"v{i - 1}"] if i else [], [f"v{i}"]) for i in wide]
    stage = [flow_call(f"S{i}", ["j"], [f"w{i}"]) for i in narrow]
    for calls, joins in (
        ([*maps, flow_call("R", ["j"], ["r"])], [all_v]),
        ([*chain, flow_call("R", ["j"], ["r"])], [all_v]),
        ([*maps[:2047], *stage, flow_call("R", ["k"], ["r"])], [half_v, all_w]),
    ):
        graph = make_graph()
        submit(graph, *calls, variables=joins, labels={"r": "LATENCY"})
        assert min(_time(graph) for _ in range(3)) < 0.3 * slowness()
        graph.label("r", "DEADLINE", target_ms=1_000)
        assert min(_time(graph) for _ in range(3)) < 0.6 * slowness()


def _time(graph: Graph) -> float:
    graph.is_stale = True
    started = time.thread_time()
    deduce(graph)
    return time.thread_time() - started
