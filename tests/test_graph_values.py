"""Values on their way through a session's graph: transforms, derived variables, outputs in turn."""

from __future__ import annotations

import pytest

from graph_builder import (
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
from parrot.errors import DoubleProducer, InternalError, RequestTooLarge, VariableNotFound
from parrot.manager.call import CallState


def test_values_pass_output_and_input_transforms() -> None:
    graph = make_graph()
    submit(
        graph,
        prompt_call("A", "{{output:x}}", write("x", transforms=[{"op": "strip"}])),
        prompt_call(
            "B",
            "{{input:i}}{{output:y}}",
            read("i", "x", transforms=[{"op": "template", "text": "<{{value}}>"}]),
        ),
    )
    finish(graph, "A", " v ")
    assert graph.variable("x").value == "v"
    assert graph.live["B"].inputs["i"].text == "<v>"


def test_a_derived_variable_joins_its_sources_in_order_when_all_are_there() -> None:
    graph = make_graph()
    sources = [
        {"semantic_var_id": "x"},
        {"semantic_var_id": "s", "transforms": [{"op": "strip"}]},
        {"semantic_var_id": "x"},
    ]
    derived = join(
        "d", sources=sources, separator=", ", transforms=[{"op": "template", "text": "[{{value}}]"}]
    )
    submit(
        graph, flow_call("A", [], ["x"]), flow_call("B", ["d"], ["y"]), variables=[derived, value("s", " s ")]
    )
    assert graph.variable("d").pending
    assert names(finish(graph, "A", "v").ready) == ["B"]
    assert graph.variable("d").value == "[v, s, v]"
    submit(graph, variables=[join("later", "d", "x", separator="")])
    assert graph.variable("later").value == "[v, s, v]v"


def test_a_call_starts_when_its_own_inputs_are_there() -> None:
    graph = make_graph()
    submit(
        graph,
        flow_call("A1", [], ["a1"]),
        flow_call("A2", [], ["a2"]),
        flow_call("B1", ["a1"], ["b1"]),
        flow_call("B2", ["a2"], ["b2"]),
    )
    assert names(finish(graph, "A1", "v").ready) == ["B1"]
    assert states(graph) == {"A1": "done", "A2": "queued", "B1": "queued", "B2": "waiting"}


def test_consecutive_ready_steps_are_dispatched_together_and_the_rest_later() -> None:
    graph = make_graph()
    submit(
        graph,
        prompt_call("A", "{{output:x}}{{output:y}}{{input:late}}{{output:z}}"),
        variables=[value("late")],
    )
    call = graph.live["A"]
    assert [step.index for step in call.dispatch("engine-0")] == [0, 1]
    assert graph.set_value("late", "v").ready == []
    assert graph.complete(call, 0, "x").ready == []
    assert graph.variable("x").value == "x"
    assert graph.complete(call, 1, "y", b"\1\0\0\0").ready == [call]
    assert call.outputs["y"].token_ids == b"\1\0\0\0"
    assert [step.index for step in call.dispatch("engine-1")] == [2]
    assert graph.complete(call, 2, "z").ended == [call]
    assert (call.state, call.attempts, call.error) == (CallState.DONE, 2, None)


def test_an_output_used_before_later_inputs() -> None:
    graph = make_graph()
    submit(
        graph,
        prompt_call(
            "A",
            "{{output:plan}} Now {{input:plan}}: {{output:code}}",
            write("plan", transforms=[{"op": "strip"}]),
        ),
    )
    call = graph.live["A"]
    assert [step.index for step in call.dispatch("engine-0")] == [0]
    assert graph.complete(call, 0, " p ").ready == [call]
    assert call.inputs["plan"].text == "p"
    assert call.outputs["plan"].raw == " p "


def test_a_call_lost_by_its_engine_keeps_the_outputs_that_came() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["x", "y"]))
    call = graph.live["A"]
    call.dispatch("engine-0")
    graph.complete(call, 0, "x")
    call.requeue()
    assert (call.state, call.engine, call.num_dispatched) == (CallState.QUEUED, None, 1)
    assert [step.index for step in call.dispatch("engine-1")] == [1]
    assert graph.complete(call, 1, "y").stopped == []
    assert states(graph) == {"A": "done"}


def test_an_output_out_of_turn_is_a_bug() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["x", "y"]))
    with pytest.raises(InternalError, match="output 1 came when 0 was due"):
        graph.complete(graph.live["A"], 1, "y")


def test_setting_a_variable_twice_or_one_that_is_produced_is_refused() -> None:
    graph = make_graph(max_value_bytes=10)
    submit(graph, flow_call("A", [], ["x"]), variables=[value("v"), join("d", "x")])
    with pytest.raises(RequestTooLarge, match="variable v"):
        graph.set_value("v", "12345678901")
    graph.set_value("v", "text")
    for var_id, reason in (("v", "ended already"), ("x", "is an output of A"), ("d", "is derived")):
        with pytest.raises(DoubleProducer, match=reason):
            graph.set_value(var_id, "more")
    with pytest.raises(VariableNotFound):
        graph.set_value("nowhere", "v")
    graph.set_value("v", "text")  # whose answer was lost
    assert graph.variable("v").value == "text"
