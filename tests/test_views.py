"""The graph as JSON: states, links, objectives and errors, without values."""

from __future__ import annotations

from graph_builder import flow_call, join, make_graph, prompt_call, read, submit, value
from parrot.errors import EngineLost
from parrot.manager.analysis import deduce
from parrot.manager.views import call_view, graph_view


def test_a_graph_is_shown_with_links_states_and_errors() -> None:
    graph = make_graph()
    submit(
        graph,
        prompt_call("A", "{{input:s}}{{input:c}}{{output:x}}", read("c", value="constant")),
        flow_call("B", ["d"], ["y"]),
        variables=[value("s", "secret text"), join("d", "x")],
        labels={"y": "LATENCY"},
    )
    deduce(graph)
    call = graph.live["A"]
    call.dispatch("engine-0")
    call.timing.dispatched_us = 5
    call.prompt_tokens = 7
    graph.fail(call, EngineLost("gone").to_info())

    view = graph_view(graph)
    assert view.model_dump_json().count("secret text") == 0
    a, b = view.calls
    assert (a.request_id, a.state, a.engine, a.attempts) == ("A", "failed", "engine-0", 1)
    assert (a.inputs, a.outputs) == ({"s": "s"}, {"x": "x"})
    assert (a.objective, a.depth, a.task_group, a.prompt_tokens) == ("LATENCY", 1, None, 7)
    assert (a.timing.submitted_us, a.timing.dispatched_us, a.timing.finished_us) == (0, 5, None)
    assert a.error == {"code": "engine_lost", "message": "gone"}
    assert b.error is not None
    assert [cause["code"] for cause in b.error["causes"]] == ["upstream_failed", "engine_lost"]

    variables = {variable.semantic_var_id: variable for variable in view.variables}
    assert (variables["s"].state, variables["s"].num_chars, variables["s"].consumers) == ("ready", 11, ("A",))
    assert (variables["x"].state, variables["x"].producer) == ("failed", "A")
    assert (variables["d"].producer, variables["d"].sources) == (None, ("x",))
    assert variables["y"].criteria == "LATENCY"


def test_a_call_view_stays_as_it_was_taken() -> None:
    graph = make_graph()
    call = submit(graph, flow_call("A", [], ["x"])).calls[0]
    view = call_view(call)
    call.dispatch("engine-0")
    assert (view.state, call_view(call).state) == ("queued", "running")
