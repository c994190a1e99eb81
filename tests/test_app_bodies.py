"""Bodies that the HTTP API refuses: malformed, strange, too large, impossible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from app_harness import NOBODY, call_body, check_error, new_session, run
from manager_harness import Manager
from parrot.api import ErrorReply


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


def test_what_is_not_utf8_or_nested_too_deeply_has_its_place_on_every_route(tiny_model: Path) -> None:
    begin = b'{"session_id": "'
    bad = [
        (begin + b'\xff"}', "the body is not valid UTF-8 at byte 16"),
        (begin + b'\xed\xa0\x80"}', "the body is not valid UTF-8 at byte 16"),  # half of a surrogate pair
        (begin + b" " * 2**21 + b'\xff"}', f"the body is not valid UTF-8 at byte {2**21 + 16}"),
        (json.dumps({"session_id": "a"}).encode("utf-16"), "the body is not valid UTF-8 at byte 0"),
        (b'{"session_id": ' + b"[" * 100_000, "the body is nested too deeply"),
    ]

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        paths = (await client.get("/openapi.json")).json()["paths"]
        routes = [path for path, kinds in paths.items() if "requestBody" in kinds.get("post", {})]
        assert len(routes) == 6
        for route in routes:
            for raw, expected in bad:
                reply = await client.post(route, content=raw, headers={"content-type": "application/json"})
                error = check_error(reply, 400, "invalid_request")
                assert (error["message"], error["param"]) == (expected, None), route
            marked = b'\xef\xbb\xbf{"a": "b"}'  # which a reader may ignore
            reply = await client.post(route, content=marked, headers={"content-type": "application/json"})
            assert check_error(reply, 400, "invalid_request")["param"] is not None

    run(tiny_model, scenario)


def test_a_call_that_is_not_utf8_is_named(tiny_model: Path) -> None:
    raw = json.dumps({"session_id": NOBODY, "calls": [call_body("a"), call_body("MARK")]}).encode()

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        for bad in (b"\xff", b"\xed\xa0\x80"):
            headers = {"content-type": "application/json"}
            reply = await client.post("/v1/submit", content=raw.replace(b"MARK", bad), headers=headers)
            error = check_error(reply, 400, "invalid_request")
            assert error["param"] == "calls.1"
            assert "not valid UTF-8 at byte" in error["message"]

    run(tiny_model, scenario)


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000])
def test_a_number_of_thousands_of_digits_is_refused_by_the_name_of_its_field(
    tiny_model: Path, number: str
) -> None:
    hole = {"name": "y", "kind": "output", "sampling": {"seed": "NUMBER"}}
    call = {"prompt": "a {{output:y}}", "placeholders": [hole]}
    message = {"role": "user", "content": "a"}
    bodies = {
        "submit": {"session_id": NOBODY, "calls": [call]},
        "completions": {"model": "m", "prompt": "a", "seed": "NUMBER"},
        "chat/completions": {"model": "m", "messages": [message], "seed": "NUMBER"},
        "get": {"session_id": NOBODY, "semantic_var_id": "v", "timeout_ms": "NUMBER"},
    }

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        for route, body in bodies.items():
            raw = json.dumps(body).replace('"NUMBER"', number)
            headers = {"content-type": "application/json"}
            reply = await client.post(f"/v1/{route}", content=raw, headers=headers)
            error = check_error(reply, 400, "invalid_request")
            assert str(error["param"]).endswith(("seed", "timeout_ms")), error

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


def test_names_of_holes_are_no_text_of_the_prompt(tiny_model: Path) -> None:
    """Nor is what no output follows."""
    names = [f"a{number:0119}" for number in range(100)]
    prompt = "".join(f"{{{{input:{name}}}}}" for name in names) + "x {{output:y}}"
    inputs = [{"name": name, "kind": "input", "value": ""} for name in names]
    call = {"prompt": prompt, "placeholders": [*inputs, {"name": "y", "kind": "output"}]}

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        await manager.add_engine(max_model_len=64)
        session = await new_session(client)
        for text in (prompt, "x {{output:y}}" + " tail" * 10_000, "x {{output:y}} {{input:z}}"):
            bound = call["placeholders"] if text is prompt else [{"name": "y", "kind": "output"}]
            if "input:z" in text:
                bound = [*bound, {"name": "z", "kind": "input", "value": ""}]
            body = {"session_id": session, "calls": [{"prompt": text, "placeholders": bound}]}
            reply = await client.post("/v1/submit", json=body)
            assert reply.status_code == 200, reply.text
        long = {**call, "prompt": "x " * 10_000 + prompt}
        reply = await client.post("/v1/submit", json={"session_id": session, "calls": [long]})
        assert check_error(reply, 400, "prompt_too_long")["param"] == "prompt"

    run(tiny_model, scenario)


@pytest.mark.parametrize("target_ms", [1_000_001, 86_400_000])
@pytest.mark.parametrize("criteria", ["TPOT", "TTFT", "DEADLINE"])
def test_the_largest_targets_are_taken_wherever_they_can_be_said(
    tiny_model: Path, criteria: str, target_ms: int
) -> None:
    wish = {"criteria": criteria, "target_ms": target_ms}

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        engine = await manager.add_engine()
        engine.held = True
        session = await new_session(client)
        asked = {**call_body(output="a"), "objective": criteria, "target_ms": target_ms}
        calls = [asked, call_body(output="b"), call_body(output="c")]
        body = {"session_id": session, "calls": calls, "labels": [{"semantic_var_id": "b", **wish}]}
        replies = [await client.post("/v1/submit", json=body)]
        for name in "abc":  # a get of what is queued already labels it again
            get = {"session_id": session, "semantic_var_id": name, "timeout_ms": 0, **wish}
            replies.append(await client.post("/v1/get", json=get))
        engine.held = False
        assert [reply.status_code for reply in replies] == [200] * 4, [reply.text for reply in replies]
        graph = manager.service._sessions.get(session).graph
        assert all(call.error is None for call in graph.calls.values())

    run(tiny_model, scenario)
