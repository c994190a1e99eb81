"""The body of a submit: read call by call, refused by field, whatever is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parrot import api
from parrot.config import ManagerConfig
from parrot.errors import InvalidRequest, ParrotError, RequestTooLarge
from parrot.manager.slices import run_whole
from parrot.manager.submit_body import reading, schemas_of

SESSION = "s-" + "0" * 32
SOURCE = {"semantic_var_id": "a"}
CALL = {"prompt": "x {{output:y}}", "placeholders": [{"name": "y", "kind": "output"}]}


def read(body: object, **config: int) -> api.SubmitBody:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return run_whole(reading(raw, ManagerConfig(**config)))  # type: ignore[arg-type]


def refusal(body: object, **config: int) -> ParrotError:
    with pytest.raises(ParrotError) as caught:
        read(body, **config)
    assert len(caught.value.message) < 2500
    return caught.value


def test_a_body_is_what_pydantic_would_have_read() -> None:
    body = {
        "session_id": SESSION,
        "create_session": True,
        "variables": [
            {"semantic_var_id": "a", "value": "1"},
            {"semantic_var_id": "b", "sources": [{"semantic_var_id": "a"}]},
        ],
        "calls": [CALL, {**CALL, "function": "F", "objective": "LATENCY"}],
        "labels": [{"semantic_var_id": "b", "criteria": "THROUGHPUT"}],
    }
    assert dict(read(body)) == dict(api.SubmitBody.model_validate(body))
    assert dict(read({"session_id": SESSION})) == dict(api.SubmitBody(session_id=SESSION))


def test_what_was_left_out_stays_left_out() -> None:
    """Whoever writes the body down again writes what the client said."""
    assert "create_session" not in read({"session_id": SESSION, "calls": [CALL]}).model_fields_set


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"session_id": "x"}, "session_id"),
        ({"session_id": None}, "session_id"),
        ({"create_session": "maybe"}, "create_session"),
        ({"calls": 3}, "calls"),
        ({"calls": {}}, "calls"),
        ({"calls": [CALL, 7]}, "calls.1"),
        ({"calls": [CALL, {**CALL, "x" * 100_000: 1}]}, "calls.1." + "x" * 64),
        ({"calls": [{**CALL, "prompt": 1}]}, "calls.0.prompt"),
        ({"calls": [{**CALL, "prompt": "\ud800"}]}, "calls.0.prompt"),
        ({"calls": [{**CALL, "messages": []}]}, "calls.0.messages"),
        ({"calls": [{**CALL, "placeholders": [{"kind": "x"}]}]}, "calls.0.placeholders.0.name"),
        ({"variables": [{"semantic_var_id": ""}]}, "variables.0.semantic_var_id"),
        ({"labels": [{"semantic_var_id": "a", "criteria": "SOON"}]}, "labels.0.criteria"),
        ({"surprise": 1}, "surprise"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(change: dict[str, Any], param: str) -> None:
    error = refusal({"session_id": SESSION, **change})
    assert (type(error), error.param) == (InvalidRequest, param)


def test_a_missing_session_is_named() -> None:
    assert refusal({"calls": [CALL]}).param == "session_id"


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000]
)
def test_what_is_no_object_is_an_invalid_request(raw: bytes) -> None:
    assert isinstance(refusal(raw), InvalidRequest)


@pytest.mark.parametrize("schema", [b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"[" * 50_000 + b"]" * 50_000])
def test_deep_nesting_inside_a_call_is_an_invalid_request(schema: bytes) -> None:
    call = json.dumps({**CALL, "placeholders": [{"name": "y", "kind": "output", "sampling": {"schema": 1}}]})
    raw = f'{{"session_id": "{SESSION}", "calls": [{call}]}}'.encode()
    assert isinstance(refusal(raw.replace(b'"schema": 1', b'"schema": ' + schema)), InvalidRequest)


@pytest.mark.parametrize(
    ("body", "config", "param"),
    [
        ({"calls": [CALL] * 100_000}, {}, "calls"),
        ({"calls": [CALL] * 9}, {"max_calls_per_submit": 8}, "calls"),
        ({"variables": [{"semantic_var_id": "a"}] * 70_000}, {}, "variables"),
        ({"labels": [{"semantic_var_id": "a", "criteria": "LATENCY"}] * 70_000}, {}, "labels"),
        (
            {"variables": [{"semantic_var_id": name, "sources": [SOURCE] * 6} for name in "bcd"]},
            {"max_sources_per_submit": 16},
            "variables.2.sources",
        ),
    ],
    ids=["100k calls", "calls", "variables", "labels", "sources"],
)  # fmt: skip
def test_more_than_one_submit_may_have_is_too_large(
    body: dict[str, Any], config: dict[str, int], param: str
) -> None:
    error = refusal({"session_id": SESSION, **body}, **config)
    assert (type(error), error.param) == (RequestTooLarge, param)


def test_reading_pauses_between_calls() -> None:
    raw = json.dumps({"session_id": SESSION, "calls": [CALL] * 100}).encode()
    assert sum(1 for _ in reading(raw, ManagerConfig())) >= 100


def test_the_document_has_every_schema_that_it_refers_to() -> None:
    schemas = schemas_of(api.SubmitBody)
    wanted = {part.split('"')[0] for part in json.dumps(schemas).split('"#/components/schemas/')[1:]}
    assert "CallBody" in wanted
    assert wanted <= schemas.keys()


def chained(*transforms: dict[str, Any], name: str = "y") -> dict[str, Any]:
    output = {"name": name, "kind": "output", "transforms": list(transforms)}
    return {"prompt": f"x {{{{output:{name}}}}}", "placeholders": [output]}


STRIP = {"op": "strip"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"calls": [chained(STRIP), chained(*[STRIP] * 8)]}, "calls.1.placeholders.0.transforms"),
        (
            {
                "variables": [
                    {"semantic_var_id": "b", "sources": [SOURCE], "transforms": [STRIP] * 4},
                    {"semantic_var_id": "c", "sources": [SOURCE, {**SOURCE, "transforms": [STRIP] * 5}]},
                ]
            },
            "variables.1.sources.1.transforms",
        ),
        (
            {"variables": [{"semantic_var_id": "b", "sources": [SOURCE], "transforms": [STRIP] * 9}]},
            "variables.0.transforms",
        ),
    ],
    ids=["outputs", "sources", "derived"],
)
def test_transforms_of_a_submit_are_counted_wherever_they_are(body: dict[str, Any], param: str) -> None:
    error = refusal({"session_id": SESSION, **body}, max_transforms_per_submit=8)
    assert (type(error), error.param) == (RequestTooLarge, param)
    assert "8 transforms" in error.message
    read({"session_id": SESSION, **body}, max_transforms_per_submit=9)


@pytest.mark.parametrize(("op", "field"), [("regex", "pattern"), ("json", "path")])
def test_different_patterns_and_paths_are_counted_by_their_characters(op: str, field: str) -> None:
    def body(*patterns: str) -> dict[str, Any]:
        calls = [chained({"op": op, field: pattern}) for pattern in patterns]
        return {"session_id": SESSION, "calls": calls}

    limits = {"max_pattern_chars_per_submit": 20}
    read(body(*["$.abcdefgh"] * 50, "$.abcdefgi"), **limits)
    error = refusal(body("$.abcdefgh", "$.abcdefgi", "$"), **limits)
    assert (type(error), error.param) == (RequestTooLarge, "calls.2.placeholders.0.transforms")


@pytest.mark.parametrize(
    "strange",
    [{"transforms": 3}, {"sources": 3}, {"placeholders": [3, {"transforms": {}}]}, {"transforms": [3, {}]}],
)
def test_counting_takes_whatever_validation_will_refuse(strange: dict[str, Any]) -> None:
    assert isinstance(refusal({"session_id": SESSION, "calls": [{"prompt": "x", **strange}]}), InvalidRequest)
