"""Cycles are refused at the grain of steps; loops through several outputs are legal."""

from __future__ import annotations

import pytest

from graph_builder import finish, flow_call, join, make_graph, prompt_call, read, submit, value
from parrot.errors import CycleError
from parrot.manager.graph import Graph


def refuse(graph: Graph, message: str, *calls: object, **fields: object) -> None:
    before = (dict(graph.variables), dict(graph.calls))
    with pytest.raises(CycleError, match=message):
        submit(graph, *calls, **fields)  # type: ignore[arg-type]
    assert (graph.variables, graph.calls) == before


def test_calls_that_wait_for_each_other_are_refused_with_their_path() -> None:
    refuse(
        make_graph(),
        r"A \(A\) -> variable y -> B|B \(B\) -> variable x -> A",
        flow_call("A", ["x"], ["y"]),
        flow_call("B", ["y"], ["x"]),
    )
    with pytest.raises(CycleError) as raised:
        submit(
            make_graph(),
            flow_call("A", ["z"], ["x"]),
            flow_call("B", ["x"], ["z"]),
            flow_call("C", ["x"], ["w"]),
        )
    path = raised.value.message.partition(": ")[2].split(" -> ")
    assert path[0] == path[-1]
    assert set(path) == {"A (A)", "B (B)", "variable x", "variable z"}
    assert path[path.index("A (A)") + 1] == "variable x"


def test_a_call_that_reads_its_own_output_first_is_refused() -> None:
    refuse(make_graph(), "A", prompt_call("A", "{{input:i}}{{output:x}}", read("i", "x")))


def test_a_first_output_that_waits_for_a_later_one_is_refused() -> None:
    refuse(
        make_graph(),
        "variable y",
        prompt_call("A", "{{input:q}}{{output:x}}{{output:y}}"),
        flow_call("B", ["y"], ["q"]),
    )


def test_a_cycle_through_derived_variables_is_refused() -> None:
    refuse(make_graph(), "variable d", flow_call("A", ["d"], ["x"]), variables=[join("d", "x")])
    refuse(make_graph(), "variable e", variables=[join("d", "e"), join("e", "d")])


def test_a_cycle_closed_by_a_later_submit_is_refused() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", ["x"], ["y"]), variables=[value("x")])
    refuse(graph, "variable x", flow_call("B", ["y"], ["x"]))
    refuse(graph, "variable x", variables=[join("x", "y")])
    assert [call.request_id for call in submit(graph, flow_call("B", ["y"], ["z"])).calls] == ["B"]


def test_a_value_fed_round_a_loop_of_calls_is_legal_and_runs() -> None:
    graph = make_graph()
    done = submit(
        graph,
        prompt_call("A", "Draft {{output:draft}} Review: {{input:review}} Better: {{output:final}}"),
        flow_call("B", ["draft"], ["review"]),
    )
    assert done.changes.ready == [done.calls[0]]
    assert finish(graph, "A", "d").ready == [done.calls[1]]
    assert graph.calls[done.calls[0].call_id].state == "waiting"
    assert finish(graph, "B", "r").ready == [done.calls[0]]
    assert finish(graph, "A", "f").ended == [done.calls[0]]
    assert graph.variable("final").value == "f"


def test_a_long_chain_is_checked_without_recursion() -> None:
    graph = make_graph()
    calls = [
        flow_call(f"C{index}", [f"v{index - 1}"] if index else [], [f"v{index}"]) for index in range(3000)
    ]
    assert len(submit(graph, *calls).calls) == 3000
    calls[0] = flow_call("C0", ["v2999"], ["v0"])
    refuse(make_graph(), r"\(\d+ more\)", *calls)
