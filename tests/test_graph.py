"""The session graph: atomic submits, the end of a session, and the five primitives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from graph_builder import (
    body,
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
)
from machine import slowness
from parrot import api
from parrot.errors import (
    DoubleProducer,
    DuplicateRequest,
    InvalidRequest,
    ParrotError,
    RequestTooLarge,
    SessionClosed,
    TransformError,
    VariableNotFound,
)
from parrot.manager.graph import Graph
from parrot.manager.slices import run_whole


def test_the_order_inside_a_submit_does_not_matter() -> None:
    graph = make_graph()
    done = submit(
        graph,
        flow_call("B", ["x", "d"], ["y"]),
        flow_call("A", ["s"], ["x"]),
        variables=[join("d", "x"), value("s", "v")],
    )
    assert names(done.calls) == ["A", "B"]
    assert names(done.changes.ready) == ["A"]
    assert names(finish(graph, "A", "out").ready) == ["B"]
    assert graph.live["B"].inputs["d"].text == "out"


def test_ids_are_made_up_where_the_client_gave_none() -> None:
    graph = make_graph()
    call = api.CallBody(prompt="{{output:x}}", placeholders=(api.PlaceholderBody(name="x", kind="output"),))
    one, other = submit(graph, call, call).calls
    assert one.request_id != other.request_id
    assert one.call_id != other.call_id
    assert set(graph.variables) == {one.outputs["x"].variable.id, other.outputs["x"].variable.id}


@pytest.mark.parametrize(
    ("error", "bad"),
    [
        (VariableNotFound, body(flow_call("A", ["nowhere"], ["x"]))),
        (VariableNotFound, body(variables=[join("d", "nowhere")])),
        (VariableNotFound, body(labels={"nowhere": "LATENCY"})),
        (VariableNotFound, body(prompt_call("A", "{{output:x}} tail {{input:t}}", read("t", "nowhere")))),
        (DoubleProducer, body(flow_call("A", [], ["x"]), flow_call("B", [], ["x"]))),
        (DoubleProducer, body(flow_call("A", [], ["x"]), variables=[value("x", "v")])),
        (DoubleProducer, body(variables=[value("x", "v"), value("x", "v")])),
        (DoubleProducer, body(variables=[value("x", "v"), join("x", "x")])),
        (DoubleProducer, body(variables=[value("given", "v")])),
        (DoubleProducer, body(flow_call("A", [], ["given"]))),
        (DoubleProducer, body(flow_call("A", [], ["made"]))),
        (DoubleProducer, body(variables=[value("made", "v")])),
        (DoubleProducer, body(flow_call("A", [], ["derived"]))),
        (
            DoubleProducer,
            body(
                prompt_call(
                    "A", "{{input:i}}{{output:x}}", read("i", "given", semantic_var_id="given", value="v")
                )
            ),
        ),
        (DuplicateRequest, body(flow_call("A", [], ["x"]), flow_call("A", [], ["y"]))),
        (DuplicateRequest, body(flow_call("live", [], ["x"]))),
        (InvalidRequest, body(variables=[api.VariableBody(semantic_var_id="x", transforms=(api.Strip(),))])),
        (
            InvalidRequest,
            body(variables=[api.VariableBody(semantic_var_id="x", value="", transforms=(api.Strip(),))]),
        ),
        (TransformError, body(variables=[join("x", "given", transforms=[{"op": "regex", "pattern": "("}])])),
        (RequestTooLarge, body(*[flow_call(f"A{index}", [], [f"x{index}"]) for index in range(4)])),
        (RequestTooLarge, body(variables=[value("x", "é" * 51)])),
        (RequestTooLarge, body(prompt_call("A", "{{input:i}}{{output:x}}", read("i", value="v" * 101)))),
    ],
)
def test_a_bad_submit_is_refused_whole(error: type[ParrotError], bad: api.SubmitBody) -> None:
    graph = make_graph(max_calls_per_submit=3, max_value_bytes=100)
    submit(graph, flow_call("live", [], ["made"]), variables=[value("given", "v"), join("derived", "made")])
    good = body(flow_call("good", ["given"], ["new"]), variables=[value("declared")])
    mixed = api.SubmitBody(
        session_id=bad.session_id,
        variables=good.variables + bad.variables,
        calls=(good.calls + bad.calls)[:4],
        labels=bad.labels,
    )
    before = (set(graph.variables), set(graph.calls), len(graph.variable("given").consumers))
    for submit_body in (bad, mixed):
        with pytest.raises(error) as raised:
            graph.add(submit_body, now_us=0)
        assert type(raised.value) is error
    assert (set(graph.variables), set(graph.calls), len(graph.variable("given").consumers)) == before
    assert graph.variable("made").derived == [graph.variable("derived")]
    assert names(graph.add(good, now_us=0).changes.ready) == ["good"]


def test_a_request_id_may_come_again_after_its_call_ended() -> None:
    graph = make_graph()
    first = submit(graph, flow_call("A", [], ["x"])).calls[0]
    finish(graph, "A", "v")
    second = submit(graph, flow_call("A", [], ["y"])).calls[0]
    assert first.call_id != second.call_id
    assert graph.complete(first, 1, "late").ended == []
    assert graph.live == {"A": second}


def test_an_output_may_be_assigned_to_a_variable_made_beforehand() -> None:
    graph = make_graph()
    submit(graph, flow_call("B", ["x"], ["y"]), variables=[value("x")])
    submit(graph, variables=[value("x")])
    submit(graph, flow_call("A", [], ["x"]))
    assert names(finish(graph, "A", "v").ready) == ["B"]


def test_an_input_with_id_and_value_makes_a_variable_that_others_read() -> None:
    graph = make_graph()
    call = prompt_call("A", "{{input:i}}{{output:x}}", read("i", semantic_var_id="v", value="text"))
    assert names(submit(graph, call, flow_call("B", ["v"], ["y"])).changes.ready) == ["A", "B"]
    assert graph.variable("v").value == graph.live["B"].inputs["v"].text == "text"


def test_closing_ends_everything_that_is_pending() -> None:
    async def scene() -> None:
        graph = make_graph()
        submit(graph, flow_call("A", [], ["x"]), flow_call("B", ["x"], ["y"]), variables=[value("s")])
        finish(graph, "A", "v")
        waiter = asyncio.create_task(graph.variable("y").wait())
        await asyncio.sleep(0)
        changes = graph.close(SessionClosed("deleted").to_info())
        assert names(changes.ended) == names(changes.stopped) == ["B"]
        assert await waiter
        with pytest.raises(SessionClosed):
            graph.variable("y").result()
        assert error_of(graph, "s").code == "session_closed"
        assert graph.variable("x").result() == "v"
        assert states(graph) == {"A": "done", "B": "cancelled"}

    asyncio.run(scene())


def test_the_stricter_label_holds() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["x"]))
    assert not graph.is_stale
    graph.label("x", "THROUGHPUT")
    assert graph.is_stale
    graph.label("x", "LATENCY")
    graph.is_stale = False
    graph.label("x", "THROUGHPUT")
    assert graph.variable("x").criteria == "LATENCY"
    assert not graph.is_stale


def test_producers_consumers_and_objectives_are_found() -> None:
    graph = make_graph()
    submit(
        graph,
        flow_call("A", [], ["x"]),
        flow_call("B", ["x", "d"], ["y"]),
        flow_call("C", ["d"], ["z"]),
        variables=[join("d", "x"), value("s", "v")],
        labels={"z": "LATENCY"},
    )
    a, b, c = graph.calls.values()
    assert graph.get_producer("x") is a
    assert graph.get_producer("d") is graph.get_producer("s") is None
    assert set(graph.get_consumers("x")) == {b, c}
    assert graph.get_consumers("z") == ()
    assert graph.get_perf_obj("z") == "LATENCY"
    assert graph.get_perf_obj("x") == "THROUGHPUT"
    assert graph.get_perf_obj("s") is None
    assert graph.set_objective(a, "LATENCY", depth=1)
    assert not graph.set_objective(a, "LATENCY", depth=1)
    assert graph.get_perf_obj("x") == "LATENCY"
    with pytest.raises(VariableNotFound):
        graph.get_producer("nowhere")


@pytest.mark.usefixtures("garbage_at_rest")
def test_4096_calls_are_inserted_in_a_fraction_of_a_second() -> None:
    maps = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(4095)]
    submitted = body(*maps, flow_call("R", [f"m{i}" for i in range(4095)], ["r"]))

    def seconds() -> float:
        graph = make_graph()
        started = time.thread_time()
        graph.add(submitted, now_us=0)
        return time.thread_time() - started

    assert min(seconds() for _ in range(3)) < 1.0 * slowness()


def test_what_happens_while_a_submit_is_checked_is_seen_before_it_is_inserted() -> None:
    def interrupted(graph: Graph, meanwhile: Callable[[], object]) -> DoubleProducer | DuplicateRequest:
        work = graph.adding(
            body(prompt_call("F", "{{output:x}}"), prompt_call("G", "{{output:y}}")), now_us=0
        )
        for _ in range(3):
            next(work)
        meanwhile()
        before = (len(graph.calls), len(graph.variables))
        with pytest.raises((DoubleProducer, DuplicateRequest)) as caught:
            run_whole(work)
        assert (len(graph.calls), len(graph.variables)) == before
        return caught.value  # type: ignore[return-value]

    graph = make_graph()
    submit(graph, variables=[value("x")])
    assert interrupted(graph, lambda: graph.set_value("x", "1")).param == "x"
    graph = make_graph()
    assert interrupted(graph, lambda: submit(graph, variables=[value("y", "1")])).param == "y"
    graph = make_graph()
    other = prompt_call("other", "{{output:z}}", request_id="G")
    assert interrupted(graph, lambda: submit(graph, other)).param == "request_id"
