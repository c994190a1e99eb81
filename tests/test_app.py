"""The HTTP API: bodies, statuses and the one shape of errors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from app_harness import call_body, check_error, new_session, run
from manager_harness import Manager, until
from parrot import wire
from parrot.api import ErrorReply


def test_a_call_goes_from_submit_to_its_value(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        await manager.add_engine(lambda text: text.split()[-1])
        session = await new_session(client)
        reply = await client.post("/v1/submit", json={"session_id": session, "calls": [call_body()]})
        assert reply.json()["calls"][0]["outputs"] == {"y": "y"}
        get = {"session_id": session, "semantic_var_id": "y", "criteria": "LATENCY"}
        value = (await client.post("/v1/get", json=get)).json()
        assert value == {"semantic_var_id": "y", "status": "ready", "value": "hi", "logprobs": None}
        graph = (await client.get(f"/v1/session/{session}/graph")).json()
        assert graph["calls"][0]["state"] == "done"
        calls = (await client.get("/v1/calls?limit=10")).json()["calls"]
        assert calls[0]["function"] == "say"
        engine = (await client.get("/v1/engines")).json()["engines"][0]
        assert (engine["name"], engine["alive"]) == ("engine-0", True)
        assert (await client.delete(f"/v1/session/{session}")).status_code == 204
        check_error(await client.post("/v1/get", json=get), 404, "session_not_found")

    run(tiny_model, scenario)


def test_a_submit_can_create_its_session_once(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        body = {"session_id": "s-" + "a" * 32, "create_session": True, "calls": [call_body()]}
        assert (await client.post("/v1/submit", json=body)).status_code == 200
        check_error(await client.post("/v1/submit", json=body), 409, "duplicate_request")

    run(tiny_model, scenario)


def test_a_get_polls_waits_and_wakes(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        session = await new_session(client)
        variable = {"session_id": session, "semantic_var_id": "v"}
        await client.post("/v1/submit", json={"session_id": session, "variables": [{"semantic_var_id": "v"}]})
        polled = await client.post("/v1/get", json={**variable, "timeout_ms": 0})
        assert polled.json()["status"] == "pending"
        waiting = asyncio.create_task(client.post("/v1/get", json=variable))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        value = "\U0001f600\x00 {{output:x}}"
        assert (await client.post("/v1/set", json={**variable, "value": value})).status_code == 204
        assert (await waiting).json()["value"] == value
        check_error(await client.post("/v1/set", json={**variable, "value": "again"}), 409, "double_producer")

    run(tiny_model, scenario)


def test_unknown_routes_and_methods_have_the_same_shape(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        check_error(await client.get("/v2/nothing"), 404, "not_found")
        assert "/docs and /openapi.json" in (await client.get("/")).json()["error"]["message"]
        assert (await client.get("/v1/submit")).status_code == 405
        ErrorReply.model_validate((await client.get("/v1/submit")).json())
        check_error(await client.get("/v1/session/nonsense/graph"), 400, "invalid_request")
        check_error(await client.get("/v1/calls?limit=0"), 400, "invalid_request")

    run(tiny_model, scenario)


def test_a_full_queue_is_429_with_retry_after(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        session = await new_session(client)
        calls = [call_body(output=f"y{i}") for i in range(3)]
        reply = await client.post("/v1/submit", json={"session_id": session, "calls": calls})
        check_error(reply, 429, "overloaded")
        assert int(reply.headers["retry-after"]) >= 1

    run(tiny_model, scenario, max_queued_calls=2)


def test_another_model_is_not_found(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        session = await new_session(client)
        body = {"session_id": session, "calls": [{**call_body(), "model": "other"}]}
        check_error(await client.post("/v1/submit", json=body), 404, "model_not_found")

    run(tiny_model, scenario)


def test_ready_follows_the_engines(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).json() == {"status": "ok", "service": "parrot"}
        check_error(await client.get("/ready"), 503, "unavailable")
        engine = await manager.add_engine()
        assert (await client.get("/ready")).json() == {"status": "ready", "engines": 1, "stalled": []}
        await engine.die()
        await until(lambda: not manager.registry.alive)
        error = check_error(await client.get("/ready"), 503, "unavailable")
        assert "engine-0" in error["message"]

    run(tiny_model, scenario)


def test_a_get_whose_deadline_passes_is_504(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        session = await new_session(client)
        await client.post("/v1/submit", json={"session_id": session, "calls": [call_body()]})
        body = {"session_id": session, "semantic_var_id": "y", "criteria": "DEADLINE", "target_ms": 30.0}
        check_error(await client.post("/v1/get", json=body), 504, "deadline_exceeded")
        graph = (await client.get(f"/v1/session/{session}/graph")).json()
        assert graph["calls"][0]["state"] == "cancelled"

    run(tiny_model, scenario)


def test_failures_of_variables_keep_their_causes(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        engine = await manager.add_engine(held=True)
        session = await new_session(client)
        second = {
            "function": "next",
            "prompt": "Then {{input:y}} {{output:z}}",
            "placeholders": [
                {"name": "y", "kind": "input", "semantic_var_id": "y"},
                {"name": "z", "kind": "output", "semantic_var_id": "z"},
            ],
        }
        await client.post("/v1/submit", json={"session_id": session, "calls": [call_body(), second]})
        cancel = {"session_id": session, "semantic_var_id": "y"}
        await until(lambda: len(engine.dispatches) == 1)
        assert (await client.post("/v1/cancel", json=cancel)).status_code == 204
        check_error(await client.post("/v1/get", json=cancel), 409, "cancelled")
        reply = await client.post("/v1/get", json={**cancel, "semantic_var_id": "z"})
        error = ErrorReply.model_validate(reply.json()).error
        assert error.type in ("UpstreamFailed", "Cancelled")
        await until(lambda: any(isinstance(message, wire.Abort) for message in engine.other))

    run(tiny_model, scenario)


def test_a_client_that_leaves_a_get_stops_waiting_in_it(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        session = await new_session(client)
        await client.post("/v1/submit", json={"session_id": session, "calls": [call_body()]})
        with pytest.raises(httpx.ReadTimeout):
            await client.post(
                "/v1/get",
                json={"session_id": session, "semantic_var_id": "y"},
                timeout=httpx.Timeout(120, read=0.1),
            )
        found = manager.service._sessions.get(session)
        await until(lambda: found.num_users == 0)

    run(tiny_model, scenario)


def test_the_openapi_document_names_the_error_body_of_every_route(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json")).json()
        assert {"/v1/submit", "/v1/get", "/v1/chat/completions", "/ready"} <= set(document["paths"])
        submit = document["paths"]["/v1/submit"]["post"]["responses"]
        assert {"200", "400", "404", "409", "413", "429", "503"} <= set(submit)
        assert "504" in document["paths"]["/v1/get"]["post"]["responses"]
        chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]
        assert chat["content"].keys() == {"application/json", "text/event-stream"}
        schema = submit["409"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorReply"}
        for path in document["paths"].values():
            for operation in path.values():
                assert "422" not in operation["responses"]

    run(tiny_model, scenario)
