"""The HTTP API: bodies, statuses and the one shape of errors."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from manager_harness import Manager, running_manager, serving, until
from parrot import wire
from parrot.api import ErrorReply

Scenario = Callable[[Manager, httpx.AsyncClient], Awaitable[None]]
NOBODY = "s-" + "0" * 32


def run(model: Path, scenario: Scenario, **config: object) -> None:
    async def main() -> None:
        async with (
            running_manager(model, **config) as manager,
            serving(manager) as url,
            httpx.AsyncClient(base_url=url, timeout=10) as client,
        ):
            await scenario(manager, client)

    asyncio.run(main())


def call_body(text: str = "hi", output: str = "y") -> dict[str, Any]:
    return {
        "function": "say",
        "prompt": "Say {{input:x}} {{output:y}}",
        "placeholders": [
            {"name": "x", "kind": "input", "value": text},
            {"name": "y", "kind": "output", "semantic_var_id": output},
        ],
    }


async def new_session(client: httpx.AsyncClient) -> str:
    reply = await client.post("/v1/session")
    assert reply.status_code == 200
    return str(reply.json()["session_id"])


def check_error(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error = ErrorReply.model_validate(reply.json()).error
    assert error.code == code, reply.text
    return error.model_dump()


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


def test_a_submit_that_comes_again_is_answered_again_and_runs_once(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        engine = await manager.add_engine(lambda _: "once")
        submit = {"session_id": NOBODY, "create_session": True, "submit_id": "mine", "calls": [call_body()]}
        first = await client.post("/v1/submit", json=submit)
        assert (await client.post("/v1/submit", json=submit)).json() == first.json()
        get = {"session_id": NOBODY, "semantic_var_id": "y"}
        assert (await client.post("/v1/get", json=get)).json()["value"] == "once"
        assert (await client.post("/v1/submit", json=submit)).json() == first.json()  # also when it has ended
        assert len(engine.dispatches) == 1
        other = {**submit, "calls": [call_body(), call_body(output="z")]}
        error = check_error(await client.post("/v1/submit", json=other), 409, "duplicate_request")
        assert error["param"] == "submit_id"
        again = {**submit, "submit_id": "another"}
        check_error(await client.post("/v1/submit", json=again), 409, "duplicate_request")

    run(tiny_model, scenario)


def test_a_live_request_id_is_a_duplicate_unless_the_submit_is_the_same(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        session = await new_session(client)
        named = {**call_body(), "request_id": "mine"}
        submit = {"session_id": session, "submit_id": "one", "calls": [named]}
        assert (await client.post("/v1/submit", json=submit)).status_code == 200
        assert (await client.post("/v1/submit", json=submit)).status_code == 200
        again = {**submit, "submit_id": "two", "calls": [{**call_body(output="z"), "request_id": "mine"}]}
        error = check_error(await client.post("/v1/submit", json=again), 409, "duplicate_request")
        assert error["param"] == "request_id"

    run(tiny_model, scenario)


def test_with_a_journal_a_restarted_service_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    """What ended keeps its end, what had not runs again, and a submit whose answer was lost is known."""
    journal = tmp_path / "journal"
    chain = [
        call_body(),
        {
            "prompt": "Then {{input:y}} {{output:z}}",
            "placeholders": [
                {"name": "y", "kind": "input", "semantic_var_id": "y"},
                {"name": "z", "kind": "output", "semantic_var_id": "z"},
            ],
        },
    ]
    submit = {"session_id": NOBODY, "create_session": True, "submit_id": "mine", "calls": chain}
    submit["variables"] = [{"semantic_var_id": "set"}]
    replies: list[Any] = []

    def get(var_id: str) -> dict[str, Any]:
        return {"session_id": NOBODY, "semantic_var_id": var_id, "timeout_ms": 3000, "criteria": "LATENCY"}

    async def before(manager: Manager, client: httpx.AsyncClient) -> None:
        def answer_once(_: str) -> str:
            engine.held = True
            return "first"

        engine = await manager.add_engine(answer_once)
        replies.append((await client.post("/v1/submit", json=submit)).json())
        assert replies[0]["durable"]
        body = {"session_id": NOBODY, "semantic_var_id": "set", "value": "by hand"}
        assert (await client.post("/v1/set", json=body)).status_code == 204
        assert (await client.post("/v1/get", json=get("y"))).json()["value"] == "first"
        pending = asyncio.create_task(client.post("/v1/get", json=get("z")))
        await until(lambda: len(engine.dispatches) == 2)
        manager.service.close()  # as SIGTERM does once the grace time is over
        check_error(await pending, 503, "stopping")
        check_error(await client.post("/v1/get", json=get("z")), 503, "stopping")
        check_error(await client.post("/v1/session"), 503, "stopping")

    async def after(manager: Manager, client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/submit", json=submit)).json() == replies[0]
        engine = await manager.add_engine(lambda _: "second")
        assert (await client.post("/v1/get", json=get("z"))).json()["value"] == "second"
        assert (await client.post("/v1/get", json=get("y"))).json()["value"] == "first"
        assert (await client.post("/v1/get", json=get("set"))).json()["value"] == "by hand"
        assert [prompt.split() for prompt in engine.prompts] == [["Then", "first"]]
        calls = (await client.get(f"/v1/session/{NOBODY}/graph")).json()["calls"]
        assert [call["state"] for call in calls] == ["done", "done"]
        assert (await client.delete(f"/v1/session/{NOBODY}")).status_code == 204

    async def at_last(manager: Manager, client: httpx.AsyncClient) -> None:
        check_error(await client.post("/v1/get", json=get("y")), 404, "session_not_found")

    for scenario in (before, after, at_last):
        run(tiny_model, scenario, journal=journal)


def test_while_the_journal_cannot_be_written_the_service_says_so_and_lives(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parrot.manager.journal._RETRY_S", 0.02)

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        await manager.add_engine()
        session = await new_session(client)
        submit = {"session_id": session, "submit_id": "s", "calls": [call_body()]}
        submit["variables"] = [
            {"semantic_var_id": "big", "value": secrets.token_hex(100_000)},
            {"semantic_var_id": "idle"},
        ]
        other = await new_session(client)
        assert manager.journal is not None
        manager.journal._store.limit_pages(12)
        check_error(await client.post("/v1/submit", json=submit), 503, "journal_unavailable")
        refused = await client.post("/v1/session")
        check_error(refused, 503, "journal_unavailable")
        assert refused.headers["retry-after"] == "1"
        check_error(await client.get("/ready"), 503, "unavailable")
        assert (await client.get("/health")).status_code == 200
        get = {"session_id": session, "semantic_var_id": "y"}
        check_error(await client.post("/v1/get", json=get), 503, "journal_unavailable")
        cancel = {"session_id": session, "semantic_var_id": "idle"}
        check_error(await client.post("/v1/cancel", json=cancel), 503, "journal_unavailable")
        check_error(await client.delete(f"/v1/session/{other}"), 503, "journal_unavailable")
        manager.journal._store.limit_pages(0)
        await until(lambda: manager.journal is not None and manager.journal.problem is None)
        assert (await client.post("/v1/submit", json=submit)).status_code == 200
        assert (await client.post("/v1/get", json=get)).json()["status"] == "ready"

    run(tiny_model, scenario, journal=tmp_path / "journal")


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


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/submit", {}, "session_id"),
        ("/v1/submit", {"session_id": "x"}, "session_id"),
        ("/v1/submit", {"session_id": NOBODY, "extra": 1}, "extra"),
        (
            "/v1/submit",
            {"session_id": NOBODY, "calls": [{"prompt": "a", "messages": []}]},
            "calls.0.messages",
        ),
        ("/v1/get", {"session_id": NOBODY, "semantic_var_id": "v", "timeout_ms": -1}, "timeout_ms"),
        ("/v1/get", {"session_id": NOBODY, "semantic_var_id": "v", "criteria": "FAST"}, "criteria"),
        ("/v1/get", {"session_id": NOBODY, "semantic_var_id": "v", "criteria": "TTFT"}, "target_ms"),
        ("/v1/get", {"session_id": NOBODY, "semantic_var_id": "v", "target_ms": 5}, "target_ms"),
        (
            "/v1/submit",
            {
                "session_id": NOBODY,
                "labels": [{"semantic_var_id": "v", "criteria": "DEADLINE", "target_ms": -1}],
            },
            "labels.0.target_ms",
        ),
        (
            "/v1/submit",
            {"session_id": NOBODY, "calls": [{"prompt": "a", "objective": "TPOT"}]},
            "calls.0.target_ms",
        ),
        ("/v1/completions", {"model": "m", "prompt": "a", "stop": ["b"] * 20}, "stop"),
        (
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": 3}]},
            "messages.0.content",
        ),
    ],
)
def test_a_malformed_body_is_a_400_that_names_the_field(
    tiny_model: Path, path: str, body: dict[str, Any], param: str
) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        error = check_error(await client.post(path, json=body), 400, "invalid_request")
        assert error["param"] == param

    run(tiny_model, scenario)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"session_id": NaN}', b"9" * 5000])
def test_a_body_that_is_no_json_is_a_400(tiny_model: Path, raw: bytes) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        headers = {"content-type": "application/json"}
        check_error(await client.post("/v1/submit", content=raw, headers=headers), 400, "invalid_request")
        assert (await client.get("/health")).status_code == 200

    run(tiny_model, scenario)


def test_a_body_cut_short_names_the_character(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        headers = {"content-type": "application/json"}
        reply = await client.post("/v1/submit", content=b'{"calls": ', headers=headers)
        error = check_error(reply, 400, "invalid_request")
        assert (error["param"], "not JSON" in error["message"]) == (None, True)
        assert "at character 10" in error["message"]

    run(tiny_model, scenario)


def test_half_of_a_surrogate_pair_is_refused_in_every_field_with_text(tiny_model: Path) -> None:
    sid, half, hole = NOBODY, "a\ud800", {"name": "y", "kind": "output"}
    messages = [{"role": "user", "content": half}]
    item, group = {"op": "item", "index": half}, {"op": "regex", "pattern": "a", "group": half}
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("set", {"session_id": sid, "semantic_var_id": "v", "value": half}, "value"),
        ("submit", {"variables": [{"semantic_var_id": "v", "value": half}]}, "variables.0.value"),
        ("submit", {"calls": [{"prompt": half}]}, "calls.0.prompt"),
        ("submit", {"calls": [{"prompt": "a", "model": half}]}, "calls.0.model"),
        ("submit", {"calls": [{"prompt": "a", "function": half}]}, "calls.0.function"),
        ("submit", {"calls": [{"messages": messages}]}, "calls.0.messages.0.content"),
        ("submit", {"calls": [{"prompt": "a", "placeholders": [{**hole, "value": half}]}]}, "value"),
        ("submit", {"calls": [{"prompt": "a", "placeholders": [{**hole, "transforms": [item]}]}]}, "index"),
        ("submit", {"calls": [{"prompt": "a", "placeholders": [{**hole, "transforms": [group]}]}]}, "group"),
        ("completions", {"model": "m", "prompt": half}, "prompt"),
        ("chat/completions", {"model": "m", "messages": messages}, "messages.0.content"),
    ]

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        for route, body, field in bodies:
            body = {"session_id": sid, **body} if route == "submit" else body
            headers = {"content-type": "application/json"}
            reply = await client.post(f"/v1/{route}", content=json.dumps(body), headers=headers)
            error = check_error(reply, 400, "invalid_request")
            assert str(error["param"]).endswith(field), error

    run(tiny_model, scenario)


@pytest.mark.parametrize("text", ["\\ud800", "\\udfff tail", "a\\u0000b", "\\u202e", "{{output:z}}"])
def test_strange_text_is_a_value_or_a_400_but_never_a_crash(tiny_model: Path, text: str) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        await manager.add_engine(lambda _: "fine")
        session = await new_session(client)
        raw = json.dumps({"session_id": session, "calls": [call_body("MARK")]}).replace("MARK", text)
        reply = await client.post("/v1/submit", content=raw, headers={"content-type": "application/json"})
        if reply.status_code == 200:
            get = await client.post("/v1/get", json={"session_id": session, "semantic_var_id": "y"})
            assert get.status_code in (200, 400)
            ErrorReply.model_validate(get.json()) if get.status_code == 400 else None
        else:
            check_error(reply, 400, "invalid_request")

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


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_limit_is_refused_while_it_is_read(tiny_model: Path, chunked: bool) -> None:
    async def pieces() -> Any:
        for _ in range(64):
            yield b" " * 1024

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        content = pieces() if chunked else b" " * 65536
        reply = await client.post("/v1/submit", content=content, headers={"content-type": "application/json"})
        error = check_error(reply, 413, "request_too_large")
        assert "16384" in error["message"]

    run(tiny_model, scenario, max_body_bytes=16384)


def test_too_many_calls_in_one_submit_are_refused(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        session = await new_session(client)
        calls = [call_body(output=f"y{i}") for i in range(3)]
        reply = await client.post("/v1/submit", json={"session_id": session, "calls": calls})
        check_error(reply, 413, "request_too_large")

    run(tiny_model, scenario, max_calls_per_submit=2)


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
            await client.post("/v1/get", json={"session_id": session, "semantic_var_id": "y"}, timeout=0.1)
        found = manager.service._sessions.get(session)
        await until(lambda: found.num_users == 0)

    run(tiny_model, scenario)


def test_the_openapi_document_names_the_error_body_of_every_route(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json")).json()
        assert {"/v1/submit", "/v1/get", "/v1/chat/completions", "/ready"} <= set(document["paths"])
        submit = document["paths"]["/v1/submit"]["post"]["responses"]
        assert {"200", "400", "404", "409", "413", "429", "503"} <= set(submit)
        schema = submit["409"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorReply"}
        for path in document["paths"].values():
            for operation in path.values():
                assert "422" not in operation["responses"]

    run(tiny_model, scenario)


def test_prompt_logprobs_are_refused_in_a_session(tiny_model: Path) -> None:
    sampling = {"prompt_logprobs": 1}
    call = {
        "prompt": "x {{output:y}}",
        "placeholders": [{"name": "y", "kind": "output", "sampling": sampling}],
    }

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        session = (await client.post("/v1/session")).json()["session_id"]
        error = check_error(
            await client.post("/v1/submit", json={"session_id": session, "calls": [call]}),
            400,
            "invalid_request",
        )
        assert error["param"] == "prompt_logprobs"

    run(tiny_model, scenario)
