"""The session graph: atomic submits, value flow, typed failures, cancellation, and the five primitives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from graph_builder import (
    body,
    finish,
    flow_call,
    join,
    make_graph,
    names,
    prompt_call,
    read,
    submit,
    value,
    write,
)
from parrot import api
from parrot.errors import (
    DoubleProducer,
    DuplicateRequest,
    EngineLost,
    ErrorInfo,
    InternalError,
    InvalidRequest,
    ParrotError,
    RequestTooLarge,
    SessionClosed,
    TransformError,
    VariableNotFound,
    error_from_info,
)
from parrot.manager.call import CallState
from parrot.manager.graph import Graph
from parrot.manager.slices import run_whole

LOST = EngineLost("the engine died").to_info()


def states(graph: Graph) -> dict[str, str]:
    return {call.request_id: call.state.value for call in graph.calls.values()}


def error_of(graph: Graph, var_id: str) -> ErrorInfo:
    error = graph.variable(var_id).error
    assert error is not None
    return error


# --- submits ---


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


# --- values ---


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


# --- failures ---


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


# --- cancellation ---


def test_cancel_stops_exactly_the_calls_that_nobody_else_needs() -> None:
    graph = make_graph()
    submit(
        graph,
        flow_call("Shared", [], ["shared"]),
        flow_call("Own", [], ["own"]),
        flow_call("R", ["shared", "own"], ["r"]),
        flow_call("S", ["shared"], ["s"]),
        flow_call("After", ["r"], ["after"]),
    )
    graph.live["Own"].dispatch("engine-0")
    changes = graph.cancel("r")
    assert names(changes.ended) == ["After", "Own", "R"]
    assert names(changes.stopped) == ["Own"]
    assert error_of(graph, "r").code == "cancelled"
    assert error_of(graph, "own").code == "cancelled"
    assert error_of(graph, "after").causes[0].code == "cancelled"
    assert names(finish(graph, "Shared", "v").ready) == ["S"]
    assert states(graph) == {
        "Shared": "done", "Own": "cancelled", "R": "cancelled", "S": "queued", "After": "failed"
    }  # fmt: skip


def test_cancel_spares_what_was_asked_for_or_set_from_outside() -> None:
    async def scene() -> None:
        graph = make_graph()
        submit(
            graph,
            flow_call("A", [], ["labelled"]),
            flow_call("B", [], ["awaited"]),
            flow_call("R", ["labelled", "awaited", "declared"], ["r"]),
            variables=[value("declared")],
            labels={"labelled": "THROUGHPUT"},
        )
        waiter = asyncio.create_task(graph.variable("awaited").wait())
        await asyncio.sleep(0)
        assert names(graph.cancel("r").ended) == ["R"]
        assert graph.variable("declared").pending
        finish(graph, "B", "v")
        assert await waiter

    asyncio.run(scene())


def test_cancelling_one_of_two_outputs_lets_the_call_go_on() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["x", "y"]), flow_call("B", ["y"], ["b"]))
    call = graph.live["A"]
    call.dispatch("engine-0")
    assert graph.cancel("x").ended == []
    assert graph.complete(call, 0, "x").ended == []
    assert names(graph.complete(call, 1, "y").ready) == ["B"]
    assert graph.variable("y").value == "y"


def test_cancelling_the_last_outputs_ends_the_call_after_the_wanted_ones() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["x", "y"]))
    call = graph.live["A"]
    call.dispatch("engine-0")
    assert graph.cancel("y").ended == []
    changes = graph.complete(call, 0, "x")
    assert changes.ended == changes.stopped == [call]
    assert call.state is CallState.CANCELLED


def test_a_reader_that_gave_up_the_step_needs_its_input_no_more() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["a"]), prompt_call("B", "{{output:x}}{{input:a}}{{output:y}}"))
    assert names(graph.cancel("y").stopped) == ["A"]
    assert finish(graph, "B", "v").ended == [graph.get_producer("x")]
    assert graph.variable("x").value == "v"


def test_an_earlier_output_is_wanted_though_the_later_one_that_reads_it_is_cancelled() -> None:
    graph = make_graph()
    submit(graph, prompt_call("A", "{{output:x}}{{input:x}}{{output:y}}"))
    assert graph.cancel("y").ended == []
    assert finish(graph, "A", "v").ended == [graph.get_producer("x")]
    assert graph.variable("x").value == "v"


def test_cancel_goes_up_through_derived_variables_and_long_chains() -> None:
    graph = make_graph()
    count = 2000
    calls = [flow_call(f"C{i}", [f"v{i - 1}"] if i else [], [f"v{i}"]) for i in range(count)]
    submit(graph, *calls, variables=[join("d", f"v{count - 1}")])
    assert len(graph.cancel("d").ended) == count
    assert graph.cancel("d").ended == []


# --- the end of a session, getters, labels ---


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


# --- primitives ---


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


def test_4096_calls_are_inserted_within_a_second() -> None:
    maps = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(4095)]
    submitted = body(*maps, flow_call("R", [f"m{i}" for i in range(4095)], ["r"]))
    graph = make_graph()
    started = time.process_time()
    graph.add(submitted, now_us=0)
    assert time.process_time() - started < 1


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
