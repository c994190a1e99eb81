"""Transforms that would hold the loop come later, and change nothing else: the same values, whatever happens
to the graph in between."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app_harness import new_session, run
from graph_builder import (
    SESSION_ID,
    body,
    error_of,
    flow_call,
    join,
    make_graph,
    prompt_call,
    read,
    submit,
    write,
)
from graph_builder import value as set_to
from manager_harness import Manager
from parrot import wire
from parrot.config import ManagerConfig
from parrot.errors import SessionClosed
from parrot.manager import operators, transforms
from parrot.manager.call import Call, CallState
from parrot.manager.flow import Changes
from parrot.manager.graph import Graph
from parrot.manager.operators import Budget
from parrot.manager.recovery import resuming
from parrot.manager.slices import run_whole
from parrot.manager.transforms import Work

LINES = "\n".join(f"{number}. word" for number in range(5000))
LONG = [{"op": "lines", "bullets": True}, {"op": "item", "index": -1}]
Transforms = Sequence[dict[str, object]]


def deferring() -> Graph:
    return Graph(SESSION_ID, config=ManagerConfig(), may_defer=True)


def do(work: Work | None) -> tuple[str | transforms.Failure, float] | None:
    if work is None:
        return None
    budget = Budget(work.max_bytes, work.left_s)
    return work.chain.run(work.value, budget), budget.spent_s


def following(changes: Changes) -> Iterator[Changes]:
    """The event's changes, the first ones and those that come later."""
    yield changes
    while changes.later is not None and not changes.later.is_over:
        work = changes.later.work
        changes = changes.later.go_on(work, do(work))
        yield changes


def write_next(graph: Graph, call: Call, text: str) -> Changes:
    call.dispatch("engine-0")
    return graph.complete(call, call.next_step, text)


def names(*events: Changes) -> list[str]:
    return [variable.id for changes in events for variable in changes.variables]


def test_a_long_output_is_transformed_later_and_its_call_ends_then() -> None:
    graph = deferring()
    first = prompt_call("A", "{{output:x}}", write("x", transforms=LONG))
    call, _ = submit(graph, first, flow_call("B", ["x"], ["y"])).calls
    changes = write_next(graph, call, LINES)
    assert (changes.variables, changes.ended, call.state) == ([], [], CallState.WAITING)
    assert changes.later is not None
    assert changes.later.work is not None
    *_, last = following(changes)
    assert graph.variables["x"].value == "word"
    assert (names(last), last.ended, call.state) == (["x"], [call], CallState.DONE)
    assert [one.request_id for one in last.ready] == ["B"]
    assert last.later is None


def test_what_is_short_comes_at_once() -> None:
    graph = deferring()
    (call,) = submit(graph, prompt_call("A", "{{output:x}}", write("x", transforms=LONG))).calls
    changes = write_next(graph, call, "1. a\n2. b")
    if changes.later is not None:  # a machine that stood still in between makes any chain a long one
        list(following(changes))
    assert graph.variables["x"].value == "b"


def test_a_failure_that_comes_later_is_that_of_the_call() -> None:
    graph = deferring()
    fails = prompt_call("A", "{{output:x}}", write("x", transforms=[*LONG, {"op": "to-number"}]))
    call, _ = submit(graph, fails, flow_call("B", ["x"], ["y"])).calls
    list(following(write_next(graph, call, LINES)))
    assert call.state is CallState.FAILED
    assert error_of(graph, "x").code == "transform_failed"
    assert error_of(graph, "y").code == "upstream_failed"


def test_a_call_goes_on_while_its_first_output_is_transformed() -> None:
    graph = deferring()
    (call,) = submit(
        graph,
        prompt_call("A", "{{output:x}} {{input:i}} {{output:y}}", write("x", transforms=LONG)),
        variables=[set_to("i")],
    ).calls
    changes = write_next(graph, call, LINES)
    assert [one.request_id for one in graph.set_value("i", "now").ready] == ["A"]
    assert not write_next(graph, call, "end").ended
    *_, last = following(changes)
    assert last.ended == [call]
    assert graph.variables["y"].value == "end"


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_what_ends_in_between_stays_as_it_ended(how: str) -> None:
    graph = deferring()
    first = prompt_call("A", "{{output:x}}", write("x", transforms=LONG))
    call, _ = submit(graph, first, flow_call("B", ["x"], ["y"])).calls
    changes = write_next(graph, call, LINES)
    ended = graph.cancel("x") if how == "cancel" else graph.close(SessionClosed("closed").to_info())
    assert call in ended.ended
    assert not ended.stopped
    assert changes.later is not None
    assert changes.later.is_over == (how == "close")
    assert not [one for later in list(following(changes))[1:] for one in (*later.variables, *later.ended)]
    assert graph.variables["x"].value is None


def test_equal_chains_of_a_long_value_are_done_once_and_failures_are_told_apart() -> None:
    graph = deferring()
    long = [
        prompt_call(f"C{n}", f"{{{{input:v}}}}{{{{output:o{n}}}}}", read("v", transforms=LONG))
        for n in range(3)
    ]
    submitted = submit(graph, *long, variables=[set_to("v", LINES)])
    worked = [changes.later.work for changes in following(submitted.changes) if changes.later is not None]
    assert sum(work is not None for work in worked) == 1
    assert [call.inputs["v"].text for call in submitted.calls] == ["word"] * 3
    assert all(call.state is CallState.QUEUED for call in submitted.calls)


def test_a_variable_of_many_long_sources_ends_however_little_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transforms, "MAX_MEMO_BYTES", 0)
    sources = [{"semantic_var_id": f"s{n}", "transforms": LONG} for n in range(4)]
    derived = join("d", "s0").model_validate(
        {"semantic_var_id": "d", "sources": sources, "separator": "+", "transforms": LONG}
    )
    values = [set_to(f"s{n}", LINES + f"\n- {'z' * 9000}{n}") for n in range(4)]
    graph = deferring()
    list(following(submit(graph, variables=[*values, derived]).changes))
    assert graph.variables["d"].value == "+".join(f"{'z' * 9000}{n}" for n in range(4))


def test_many_light_chains_let_the_loop_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "SLICE_S", 1e-9)
    calls = [
        prompt_call(f"C{n}", f"{{{{input:v}}}}{{{{output:o{n}}}}}", read("v", transforms=[_template(n)]))
        for n in range(5)
    ]
    graph = deferring()
    submitted = submit(graph, *calls, variables=[set_to("v", "a")])
    steps = list(following(submitted.changes))
    assert len(steps) == 5
    assert [call.inputs["v"].text for call in submitted.calls] == [f"{n}a" for n in range(5)]


def _template(number: int) -> dict[str, object]:
    return {"op": "template", "text": f"{number}{{{{value}}}}"}


WORST: dict[str, tuple[Transforms, str]] = {
    "numbers": ([{"op": "json"}], "[" + ",".join(["1e22"] * 200_000) + "]"),
    "objects": ([{"op": "json", "path": "$..nothing"}], "[" + ",".join(["{}"] * 340_000) + "]"),
    "items": ([{"op": "split", "separator": ","}], ("x" * 80 + ",") * 99_000),
    "matches": ([{"op": "regex", "pattern": "a[^b]*b|a", "every": True}], "a" * 12_000),
    "patterns": ([{"op": "regex", "pattern": "(a|b|ab){40}c"}], "a" * 60_000),
    "growth": ([{"op": "template", "text": "{{value}}" * 60}] * 3, "abcdefgh" * 4),
}


@pytest.mark.usefixtures("garbage_at_rest")
@pytest.mark.parametrize("name", WORST)
def test_no_legal_value_holds_the_loop(name: str) -> None:
    """Processor time of the graph's own part; by itself each takes 0.05 to 0.5 s."""
    chain, text = WORST[name]
    graph = deferring()
    (call,) = submit(graph, prompt_call("A", "{{output:x}}", write("x", transforms=chain))).calls
    call.dispatch("engine-0")
    longest = 0.0
    began = time.thread_time()
    changes = graph.complete(call, 0, text)
    longest = time.thread_time() - began
    num_works = 0
    while changes.later is not None:
        work = changes.later.work
        num_works += work is not None
        done = do(work)
        began = time.thread_time()
        changes = changes.later.go_on(work, done)
        longest = max(longest, time.thread_time() - began)
    assert num_works == 1
    assert call.ended
    assert longest < 0.1


_TEXTS = st.text('ab1,\n[]{}" ', max_size=60)
_CHAINS = st.lists(
    st.sampled_from(
        [
            {"op": "strip"},
            {"op": "lines"},
            {"op": "item", "index": 0},
            {"op": "json"},
            {"op": "split", "separator": ","},
            {"op": "join", "separator": "-"},
            {"op": "regex", "pattern": "[ab]+"},
            {"op": "template", "text": "<{{value}}>"},
            {"op": "default", "value": "none"},
        ]
    ),
    max_size=3,
)


@settings(max_examples=100, deadline=None)
@given(_TEXTS, _CHAINS, _CHAINS, _CHAINS, st.integers(0, 40))
def test_a_graph_that_defers_ends_as_one_that_does_not(
    text: str, out: Transforms, source: Transforms, inward: Transforms, light_chars: int
) -> None:
    calls = [
        prompt_call("A", "{{output:x}}", write("x", transforms=out)),
        prompt_call("B", "{{input:x}} {{input:d}} {{output:y}}", read("x", transforms=inward)),
    ]
    sources = [{"semantic_var_id": "x", "transforms": source}, {"semantic_var_id": "x"}]
    derived = join("d", "x").model_validate(
        {"semantic_var_id": "d", "sources": sources, "transforms": inward}
    )
    ends = []
    for graph in (make_graph(), deferring()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operators, "LIGHT_CHARS", light_chars)
            call, reader = graph.add(body(*calls, variables=[derived]), now_us=0).calls
            events = list(following(write_next(graph, call, text)))
        # Of several inputs that fail, the call has the error of the one that was there first.
        variables = [
            (one.id, one.value, one.error is not None if one.producer is reader else one.error)
            for one in graph.variables.values()
        ]
        ready = [one.request_id for changes in events for one in changes.ready if not one.ended]
        texts = {name: one.text for name, one in reader.inputs.items() if not reader.ended}
        ends.append((variables, ready, call.state, texts))
    assert ends[0] == ends[1]


def test_an_output_whose_transforms_a_kill_cut_short_is_there_after_it() -> None:
    """The graph is resumed from what the engine wrote; the value had not been told to anybody."""
    graph = deferring()
    first = prompt_call("A", "{{output:x}}", write("x", transforms=LONG))
    call, _ = submit(graph, first, flow_call("B", ["x"], ["y"])).calls
    binding = call.steps[0].output.binding
    binding.raw, binding.token_ids = LINES, wire.pack_ids([1])
    *_, last = following(run_whole(resuming(graph)))
    assert graph.variables["x"].value == "word"
    assert call.state is CallState.DONE
    assert [one.request_id for one in last.ready] == ["B"]
    assert graph.calls[call.call_id].next_step == 1


def test_a_service_transforms_long_values_in_a_process_of_its_own(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        session = await new_session(client)
        variables = [
            {"semantic_var_id": "v", "value": LINES},
            {"semantic_var_id": "d", "sources": [{"semantic_var_id": "v"}], "transforms": LONG},
        ]
        await client.post("/v1/submit", json={"session_id": session, "variables": variables})
        reply = await client.post("/v1/get", json={"session_id": session, "semantic_var_id": "d"})
        assert reply.json()["value"] == "word"
        assert manager.executor.deferrals.worker.num_runs == 1
        await manager.executor.deferrals.wait(60)
        assert manager.executor.deferrals.num_pending == 0

    run(tiny_model, scenario)
