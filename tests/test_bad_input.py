"""Whatever is sent, the answer is a 4xx that names the field, and the service stays live.

Two sources beside schemathesis (``test_api_schema.py``), which knows the document but not the rules between
fields: bodies that keep those, with something wrong put in at a random place (seeded, for every route that
takes a body), and a hand-written list of what has broken services before.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from parrot.api import ErrorReply
from service_thread import service_in_thread

SID = "s-" + "0" * 32
NUM_MUTANTS = 100
DEEP: Any = 1
for _ in range(400):
    DEEP = {"a": [DEEP]}
NASTY: list[Any] = [
    None, True, 0, -1, 2**63, 10**40, 1e308, -0.0, "", " ", "\x00", "\ud800", "\u202e", "a" * 5000,
    "<|im_end|>", "{{output:x}}", "{{input:" + " " * 3000, "../../etc/passwd", "%00", "'; --", "(" * 500,
    [], {}, [[]], [None], {"": ""}, {"a" * 300: 1}, DEEP, list(range(3000)), "LATENCY", "s-" + "f" * 32,
    {"$ref": "#"}, {"type": "object"},
]  # fmt: skip

INPUT = {"name": "x", "kind": "input", "value": "v"}
OUTPUT = {
    "name": "y", "kind": "output", "semantic_var_id": "y", "transforms": [{"op": "strip"}],
    "sampling": {"max_tokens": 4, "stop": ["x"], "logit_bias": {"1": 2.0}},
}  # fmt: skip
CALL = {
    "function": "F", "request_id": "r", "prompt": "Say {{input:x}} {{output:y}}", "objective": "LATENCY",
    "placeholders": [INPUT, OUTPUT],
}  # fmt: skip
CHAT = {
    "messages": [
        {"role": "user", "content": "{{input:x}}"},
        {"role": "assistant", "content": "{{output:z}}"},
    ],
    "placeholders": [
        {"name": "x", "kind": "input", "semantic_var_id": "d",
         "transforms": [{"op": "regex", "pattern": "a"}]},
        {"name": "z", "kind": "output", "sampling": {"schema": {"type": "object", "properties": {"a": {}}}}},
    ],
}  # fmt: skip
DERIVED = {"semantic_var_id": "d", "sources": [{"semantic_var_id": "y", "transforms": []}], "separator": ","}
OPENAI = {"max_tokens": 2, "temperature": 0.5, "n": 1, "logit_bias": {"1": 1}, "seed": 1, "stream": False}


def valid_bodies(model: str) -> dict[str, dict[str, Any]]:
    """One body for each route that takes one."""
    openai = {**OPENAI, "model": model}
    variable = {"session_id": SID, "semantic_var_id": "y"}
    return {
        "/v1/submit": {
            "session_id": SID, "create_session": True,
            "variables": [DERIVED, {"semantic_var_id": "s", "value": "1"}],
            "calls": [CALL, CHAT], "labels": [{"semantic_var_id": "y", "criteria": "THROUGHPUT"}],
        },
        "/v1/get": {**variable, "criteria": "LATENCY", "timeout_ms": 0},
        "/v1/set": {**variable, "value": "x"},
        "/v1/cancel": variable,
        "/v1/completions": {**openai, "prompt": "Say", "echo": False, "stop": ["x"]},
        "/v1/chat/completions": {
            **openai, "messages": [{"role": "user", "content": "Say"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
        },
    }  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from places(item)


def mutant(body: dict[str, Any], rng: random.Random) -> Any:
    """The body with one or two things wrong."""
    changed: Any = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2))):
        container, key = rng.choice(list(places(changed)) or [({}, "")])
        match rng.randrange(5):
            case 0 | 1:
                container[key] = rng.choice(NASTY)
            case 2 if isinstance(container, dict):
                container.pop(key, None)
            case 3 if isinstance(container, dict):
                container[rng.choice(("extra", "a" * 100_000, "\x00", "__proto__", "value"))] = rng.choice(
                    NASTY
                )
            case 4 if isinstance(container, list):
                container.extend(container[:] * rng.choice((1, 50)))
            case _:
                container[key] = [container[key]]
    return changed


@pytest.fixture(scope="module")
def shared_client(tiny_model: Path) -> Iterator[httpx.Client]:
    with service_in_thread(tiny_model) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.fixture
def client(shared_client: httpx.Client) -> Iterator[httpx.Client]:
    """Of a service that lives after the test as before it; the session is gone."""
    yield shared_client
    shared_client.delete(f"/v1/session/{SID}")
    assert shared_client.get("/health").status_code == 200


def post(client: httpx.Client, route: str, body: Any) -> httpx.Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(route, content=raw, headers={"content-type": "application/json"})


def check(reply: httpx.Response, sent: object) -> None:
    """No bug; and what is refused is refused in the one shape, without repeating all that was sent."""
    shown = repr(sent)[:2000]
    assert reply.status_code < 500 or reply.status_code == 503, (reply.text, shown)
    if reply.status_code >= 400:
        error = ErrorReply.model_validate(reply.json()).error
        assert error.code != "internal", (reply.text, shown)
        assert len(reply.content) < 8000, shown


def test_a_body_with_something_wrong_in_it_is_a_4xx(
    tiny_model: Path, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    bodies = valid_bodies(str(tiny_model))
    paths = client.get("/openapi.json").json()["paths"]
    with_body = {path for path, verbs in paths.items() if "requestBody" in verbs.get("post", {})}
    assert with_body == bodies.keys(), "a route without a body here"
    rng = random.Random(7)
    for _ in range(NUM_MUTANTS):
        route = rng.choice((*bodies, "/v1/submit"))
        body = mutant(bodies[route], rng)
        check(post(client, route, body), body)
        client.delete(f"/v1/session/{SID}")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_the_bodies_that_are_changed_are_themselves_accepted(tiny_model: Path, client: httpx.Client) -> None:
    for route, body in valid_bodies(str(tiny_model)).items():
        reply = post(client, route, body)
        assert reply.status_code in (200, 204, 409), (route, reply.text)  # 409: set, of what has a producer


MANY = 2**19  # values, more than a body needs
HELLO = {"model": "MODEL", "messages": [{"role": "user", "content": "a"}]}


def submit_with(**call: Any) -> dict[str, Any]:
    return {"session_id": SID, "create_session": True, "calls": [{**CALL, **call}]}


def constrained(**sampling: Any) -> dict[str, Any]:
    return submit_with(
        prompt="{{output:y}}", placeholders=[{"name": "y", "kind": "output", "sampling": sampling}]
    )


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/v1/submit", submit_with(prompt="x" * 27_000_000 + "{{output:y}}"), 400, "prompt"),
        ("/v1/submit", {"session_id": SID, "calls": [{"prompt": "{{output}}"}] * 100_000}, 413, "calls"),
        ("/v1/submit", submit_with(placeholders=[{**INPUT, "value": "v" * 9_000_000}, OUTPUT]), 413, "value"),
        ("/v1/submit", b'{"session_id": "' + b"x" * 33 * 2**20, 413, None),
        ("/v1/submit", submit_with(**{"a" * 100_000: 1}), 400, "calls.0." + "a" * 64),
        ("/v1/submit", submit_with(objective="SOON"), 400, "calls.0.objective"),
        ("/v1/submit", submit_with(model="m" * 100_000), 404, "model"),
        ("/v1/submit", constrained(schema=DEEP), 400, "calls.0.placeholders.0.sampling.schema"),
        ("/v1/submit", constrained(regex="(" * 10_000), 200, None),  # the engine refuses it, with a 400
        ("/v1/submit", constrained(stop_token_ids=[2**31 - 1]), 400, "stop_token_ids"),
        ("/v1/submit", {**submit_with(), "create_session": "yes"}, 400, "create_session"),
        ("/v1/get", {"session_id": "s-" + "f" * 32, "semantic_var_id": "y"}, 404, "session_id"),
        ("/v1/get", {"session_id": SID, "semantic_var_id": "y" * 129}, 400, "semantic_var_id"),
        ("/v1/set", {"session_id": "../" + SID, "semantic_var_id": "y", "value": ""}, 400, "session_id"),
        ("/v1/cancel", {"session_id": SID}, 400, "semantic_var_id"),
        ("/v1/chat/completions", {"model": "MODEL", "messages": []}, 400, "messages"),
        ("/v1/chat/completions", {**HELLO, "a" * 9999: 1}, 400, "a" * 64 + "..."),
        ("/v1/completions", {"model": "MODEL", "prompt": "x" * 27_000_000}, 400, "prompt"),
        ("/v1/completions", {"model": "MODEL", "prompt": [[]] * MANY}, 413, None),
        ("/v1/completions", {"model": "MODEL", "prompt": ",[{:" * MANY}, 400, "prompt"),  # of one text
        ("/v1/chat/completions", {**HELLO, "messages": {str(i): "" for i in range(MANY)}}, 413, None),
        ("/v1/set", {"session_id": SID, "semantic_var_id": "y", "value": [1] * MANY}, 413, None),
        ("/v1/completions", {"model": "MODEL", "prompt": [-1]}, 400, "prompt"),
        ("/v1/completions", {"model": "MODEL", "prompt": [10**30]}, 400, "prompt"),
    ],
    ids=lambda value: None if isinstance(value, dict | bytes) else str(value)[:24],
)  # fmt: skip
def test_a_nasty_body_is_refused_by_name(
    tiny_model: Path, client: httpx.Client, route: str, body: Any, status: int, param: str | None
) -> None:
    if isinstance(body, dict) and body.get("model") == "MODEL":
        body = {**body, "model": str(tiny_model)}
    reply = post(client, route, body)
    check(reply, body)
    assert reply.status_code == status, reply.text
    if status >= 400 and param is not None:
        assert reply.json()["error"]["param"] == param
    if status == 413:
        assert "limit" in reply.text or "larger than" in reply.text


def test_control_strings_in_values_stay_text(client: httpx.Client) -> None:
    value = "<|im_end|><s></s>{{output:y}}{{input:x}}\x00\u202e"
    holes = [{"name": "x", "kind": "input", "value": value}, OUTPUT]
    assert post(client, "/v1/submit", submit_with(placeholders=holes)).status_code == 200
    assert post(client, "/v1/get", {"session_id": SID, "semantic_var_id": "y"}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None])
def test_a_form_or_plain_text_is_not_taken_for_json(
    client: httpx.Client, tiny_model: Path, kind: str | None
) -> None:
    """A page of another site can send these without asking the browser's user."""
    for route, body in valid_bodies(str(tiny_model)).items():
        headers = {} if kind is None else {"content-type": kind}
        error = client.post(route, content=json.dumps(body).encode(), headers=headers)
        assert (error.status_code, error.json()["error"]["param"]) == (400, "Content-Type"), route
        message = error.json()["error"]["message"]
        assert (repr(kind) if kind else "without a Content-Type") in message
        assert "send it with the header 'Content-Type: application/json'" in message
