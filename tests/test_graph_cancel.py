"""Cancelling variables: exactly the calls that nobody else needs stop."""

from __future__ import annotations

import asyncio

from graph_builder import (
    error_of,
    finish,
    flow_call,
    join,
    make_graph,
    names,
    prompt_call,
    states,
    submit,
    value,
)
from parrot.manager.call import CallState


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
    asked, unread = error_of(graph, "r"), error_of(graph, "own")
    assert (asked.code, asked.message) == ("cancelled", "variable r (an output of R) was cancelled")
    assert (unread.code, unread.message) == (
        "cancelled",
        "variable own (an output of Own): everything that needed it was cancelled",
    )
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
