"""A wrong body of some megabytes is refused with a few words, not with one for each of its million items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from parrot import api
from parrot.manager.openai_bodies import ChatRequest, CompletionRequest

MANY = 50_000
BODIES = [api.SubmitBody, api.GetBody, api.SetBody, api.CancelBody, CompletionRequest, ChatRequest]
SESSION = "s-" + "0" * 32
GET = {"session_id": SESSION, "semantic_var_id": "v"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
CALL = {"prompt": "x"}
FIELDS = {f"field{i}": 1 for i in range(MANY)}


def lists(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists in a schema of pydantic's core, and the dictionaries of which each entry is looked at."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple"):
            yield schema
        for name, inner in schema.items():
            if name != "serialization":
                yield from lists(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from lists(inner)


@pytest.mark.parametrize("model", BODIES)
def test_every_list_of_a_body_ends_at_its_first_bad_item(model: type[BaseModel]) -> None:
    found = list(lists(model.__pydantic_core_schema__))
    assert found or model in (api.GetBody, api.SetBody, api.CancelBody)
    for schema in found:
        assert schema.get("fail_fast"), schema


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"model": "m", "prompt": [1] * MANY + ["a"]}),
        (CompletionRequest, {"model": "m", "prompt": [None] * MANY}),
        (CompletionRequest, {"model": "m", "prompt": [[None] * MANY] * 3}),
        (CompletionRequest, {"model": "m", "prompt": "x", "stop_token_ids": ["a"] * MANY}),
        (CompletionRequest, {"model": "m", "prompt": "x", "logit_bias": FIELDS}),
        (ChatRequest, CHAT | {"messages": [1] * MANY}),
        (ChatRequest, CHAT | {"messages": [{"role": "user", "content": ["a"] * MANY}]}),
        (api.GetBody, GET | FIELDS),
        (api.SetBody, GET | {"value": "x"} | FIELDS),
        (api.SubmitBody, {"session_id": SESSION, "calls": [1] * MANY}),
        (api.CallBody, CALL | FIELDS),
        (api.CallBody, CALL | {"placeholders": [FIELDS | {"name": "a", "kind": "input"}]}),
        (api.VariableBody, {"semantic_var_id": "v", "sources": [{}] * MANY}),
        (api.SamplingBody, {"logit_bias": FIELDS}),
    ],
)
def test_what_is_wrong_is_said_in_a_few_words(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 8
