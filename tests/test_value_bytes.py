"""Values of a session and of a tenant are bounded together, however they come to exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from app_harness import check_error, new_session, run
from graph_builder import SESSION_ID, make_graph, prompt_call, read, submit, write
from manager_harness import Manager
from parrot import api
from parrot.config import ManagerConfig
from parrot.errors import RateLimited, RequestTooLarge, ValueTooLarge
from parrot.manager.graph import Graph
from parrot.manager.slices import run_whole
from parrot.manager.transforms import MAX_MEMO_BYTES, Transformer, compile_chain
from parrot.manager.value_bytes import Held, size_of

LIMIT = 100_000


def derived(var_id: str, text: str) -> dict[str, Any]:
    transforms = [{"op": "template", "text": text}]
    return {"semantic_var_id": var_id, "sources": [{"semantic_var_id": "v"}], "transforms": transforms}


def graph_with(*variables: dict[str, Any], held: Held | None = None, **config: int) -> Graph:
    limits: dict[str, Any] = {"max_session_value_bytes": LIMIT, **config}
    graph = Graph(SESSION_ID, config=ManagerConfig(**limits), held=held)
    graph.add(api.SubmitBody.model_validate({"session_id": SESSION_ID, "variables": variables}), now_us=0)
    return graph


def live_bytes(graph: Graph) -> int:
    values = {id(one.value): one.value for one in graph.variables.values() if one.value}
    return sum(map(size_of, values.values()))


def test_derived_values_beyond_the_sessions_bytes_fail_by_type() -> None:
    copies = [derived(f"d{number}", f"{number}" + "{{value}}" * 10) for number in range(20)]
    graph = graph_with({"semantic_var_id": "v", "value": "x" * 1000}, *copies)
    ends = [graph.variable(f"d{number}") for number in range(20)]
    failed = [one for one in ends if one.error is not None]
    assert len(failed) == 20 - 9
    assert {one.error.code for one in failed if one.error} == {"value_too_large"}
    with pytest.raises(ValueTooLarge, match="100000 bytes"):
        failed[0].result()
    assert graph.values.num_bytes == live_bytes(graph) <= LIMIT


def test_what_is_the_same_string_counts_once() -> None:
    same = [derived(f"d{number}", "a{{value}}" * 10) for number in range(20)]
    plain = [{"semantic_var_id": f"p{n}", "sources": [{"semantic_var_id": "v"}]} for n in range(200)]
    graph = graph_with({"semantic_var_id": "v", "value": "x" * 1000}, *same, *plain)
    assert all(one.error is None for one in graph.variables.values())
    assert graph.values.num_bytes == live_bytes(graph)


def test_texts_of_inputs_and_outputs_count_and_fail_their_call() -> None:
    graph = make_graph(max_session_value_bytes=LIMIT)
    grow = [{"op": "template", "text": "{{value}}" * 30}]
    reader = prompt_call("R", "{{input:i}}{{output:o}}", read("i", "w", transforms=grow), write("o"))
    writer = prompt_call("W", "{{output:w}}", write("w"))
    calls = submit(graph, writer, reader).calls
    graph.complete(calls[0], 0, "x" * 4000)
    assert calls[1].error is not None
    assert calls[1].error.code == "value_too_large"
    other = submit(graph, prompt_call("X", "{{output:x}}", write("x"))).calls[0]
    graph.complete(other, 0, "x" * LIMIT)
    assert other.error is not None
    assert other.error.code == "value_too_large"
    assert graph.values.num_bytes == size_of("x" * 4000)


def test_what_is_given_beyond_the_limits_is_refused_and_changes_nothing() -> None:
    held = Held()
    graph = graph_with(
        {"semantic_var_id": "v"}, {"semantic_var_id": "w"}, held=held, max_tenant_value_bytes=150_000
    )
    other = graph_with({"semantic_var_id": "v"}, held=held, max_tenant_value_bytes=150_000)
    graph.set_value("v", "x" * 80_000)
    with pytest.raises(RequestTooLarge, match="max_session_value_bytes"):
        graph.set_value("w", "x" * 30_000)
    constant = prompt_call("F", "{{input:i}}{{output:o}}", read("i", value="x" * 30_000), write("o"))
    with pytest.raises(RequestTooLarge, match="max_session_value_bytes"):
        submit(graph, constant)
    with pytest.raises(RateLimited, match="max_tenant_value_bytes"):
        other.set_value("v", "x" * 80_000)
    assert graph.variable("w").pending
    assert held.num_bytes == graph.values.num_bytes == size_of("x" * 80_000)
    run_whole(graph.releasing())
    assert held.num_bytes == 0
    other.set_value("v", "x" * 80_000)


def test_results_for_equal_chains_are_kept_within_bounds() -> None:
    transforms = api.VariableBody.model_validate(derived("d", "{{value}}" * 7)).transforms
    transformer = Transformer(8 * 2**20)
    chain = compile_chain(transforms, where="d")
    for number in range(80):
        transformer.apply(chain, f"{number}" + "x" * 2**20, where="d")
    kept = sum(size_of(result) for result in transformer._known.values() if isinstance(result, str))
    assert 0 < kept <= MAX_MEMO_BYTES


def test_a_deleted_session_gives_its_bytes_back(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        def body(session: str, var_id: str) -> dict[str, Any]:
            variables = [{"semantic_var_id": var_id, "value": "x" * 60_000}]
            return {"session_id": session, "variables": variables}

        sessions = [await new_session(client) for _ in range(3)]
        for session in sessions[:2]:
            assert (await client.post("/v1/submit", json=body(session, "v"))).status_code == 200
        reply = await client.post("/v1/submit", json=body(sessions[0], "w"))
        assert check_error(reply, 413, "request_too_large")["param"] == "value"
        reply = await client.post("/v1/submit", json=body(sessions[2], "v"))
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        manager.service.delete_session(sessions[0])
        assert (await client.post("/v1/submit", json=body(sessions[2], "v"))).status_code == 200
        for session in sessions[1:]:
            manager.service.delete_session(session)
        assert manager.service.tenants.get("default").held.num_bytes == 0

    run(tiny_model, scenario, max_session_value_bytes=LIMIT, max_tenant_value_bytes=150_000)
