"""Failures in a session's graph: what they reach, with which causes, and what they spare."""

from __future__ import annotations

from graph_builder import (
    error_of,
    finish,
    flow_call,
    join,
    make_graph,
    names,
    prompt_call,
    read,
    states,
    submit,
    value,
    write,
)
from parrot.errors import EngineLost, error_from_info
from parrot.manager.call import CallState

LOST = EngineLost("the engine died").to_info()


def test_a_failure_reaches_every_dependent_with_the_chain_of_causes() -> None:
    graph = make_graph()
    submit(
        graph,
        flow_call("A", [], ["a"]),
        flow_call("B", ["d"], ["b"]),
        flow_call("C", ["b"], ["c"]),
        variables=[join("d", "a")],
    )
    graph.live["A"].dispatch("engine-0")
    changes = graph.fail(graph.live["A"], LOST)
    assert names(changes.ended) == ["A", "B", "C"]
    assert names(changes.stopped) == ["A"]
    assert error_of(graph, "a") == LOST
    error = error_of(graph, "c")
    assert error.code == "upstream_failed"
    assert "C (C)" in error.message
    assert "'b'" in error.message
    assert "variable b" in error.message
    assert [cause.code for cause in error.causes] == ["upstream_failed", "upstream_failed", "engine_lost"]
    assert "B (B)" in error.causes[0].message
    assert "variable d" in error.causes[1].message
    assert {call.state for call in graph.calls.values()} == {CallState.FAILED}
    assert not graph.live


def test_a_failed_derived_variable_is_told_from_its_source() -> None:
    graph = make_graph()
    tenth = [{"op": "split", "separator": ","}, {"op": "item", "index": 9}]
    submit(
        graph,
        flow_call("A", ["v2"], ["a"]),
        variables=[value("v1", "x,y"), join("v2", "v1", transforms=tenth)],
    )
    error = error_from_info(error_of(graph, "a"))
    message, cause = str(error).split("\n  because: ")
    assert message == error.message
    assert message.endswith("'v2': variable v2 (derived from v1) failed")
    assert cause.startswith("variable v2 (derived from v1): transform 2 (item): no item 9 in a list of 2")


def test_siblings_that_others_need_run_on() -> None:
    graph = make_graph()
    submit(
        graph,
        flow_call("M1", [], ["m1"]),
        flow_call("M2", [], ["m2"]),
        flow_call("R", ["m1", "m2"], ["r"]),
        flow_call("S", ["m2"], ["s"]),
    )
    assert names(graph.fail(graph.live["M1"], LOST).ended) == ["M1", "R"]
    assert names(finish(graph, "M2", "v").ready) == ["S"]
    finish(graph, "S", "v")
    assert states(graph) == {"M1": "failed", "M2": "done", "R": "failed", "S": "done"}


def test_a_failed_output_transform_is_the_error_of_that_variable_alone() -> None:
    graph = make_graph()
    submit(
        graph,
        prompt_call("A", "{{output:x}}{{output:y}}", write("x", transforms=[{"op": "json", "path": "$.a"}])),
        flow_call("B", ["x"], ["b"]),
        flow_call("C", ["y"], ["c"]),
    )
    graph.live["A"].dispatch("engine-0")
    assert names(graph.complete(graph.live["A"], 0, "no json").ended) == ["B"]
    assert error_of(graph, "x").code == "transform_failed"
    assert "call A (A), output 'x'" in error_of(graph, "x").message
    assert error_of(graph, "b").causes[0].code == "transform_failed"
    assert names(graph.complete(graph.live["A"], 1, "v").ready) == ["C"]
    assert graph.variable("y").value == "v"
    assert states(graph)["A"] == "failed"


def test_a_failed_input_transform_fails_the_call_and_not_the_variable() -> None:
    graph = make_graph()
    split = [{"op": "split", "separator": ","}, {"op": "item", "index": 3}]
    submit(
        graph,
        prompt_call("A", "{{input:i}}{{output:x}}", read("i", "s", transforms=split)),
        flow_call("B", ["s"], ["y"]),
        variables=[value("s")],
    )
    changes = graph.set_value("s", "a,b")
    assert names(changes.ended) == ["A"]
    assert names(changes.ready) == ["B"]
    assert error_of(graph, "x").code == "transform_failed"
    constant = prompt_call("C", "{{input:i}}{{output:z}}", read("i", value="a", transforms=split))
    assert names(submit(graph, constant).changes.ended) == ["C"]


def test_steps_before_a_failed_input_still_run() -> None:
    graph = make_graph()
    submit(
        graph,
        flow_call("A", [], ["a"]),
        prompt_call("B", "{{output:x}}{{input:a}}{{output:y}}"),
        flow_call("C", ["x"], ["c"]),
    )
    graph.live["B"].dispatch("engine-0")
    assert names(graph.fail(graph.live["A"], LOST).ended) == ["A"]
    assert error_of(graph, "y").code == "upstream_failed"
    changes = graph.complete(graph.live["B"], 0, "v")
    assert (names(changes.ended), names(changes.ready), changes.stopped) == (["B"], ["C"], [])
    assert graph.variable("x").value == "v"
    assert states(graph)["B"] == "failed"


def test_a_consumer_of_a_variable_that_failed_before_fails_at_once() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["a"]))
    graph.fail(graph.live["A"], LOST)
    changes = submit(
        graph, flow_call("B", ["a"], ["b"]), flow_call("C", ["d"], ["c"]), variables=[join("d", "a")]
    ).changes
    assert names(changes.ended) == ["B", "C"]
    assert changes.ready == []
    assert error_of(graph, "c").causes[-1].code == "engine_lost"


def test_a_long_chain_fails_fast_and_keeps_nearest_cause_and_root() -> None:
    graph = make_graph()
    count = 3000
    submit(graph, *[flow_call(f"C{i}", [f"v{i - 1}"] if i else [], [f"v{i}"]) for i in range(count)])
    assert len(graph.fail(graph.live["C0"], LOST).ended) == count
    causes = error_of(graph, f"v{count - 1}").causes
    assert f"C{count - 2} " in causes[0].message
    assert causes[-1] == LOST
    assert len(causes) <= 8
