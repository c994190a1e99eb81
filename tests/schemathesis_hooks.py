"""Loaded by schemathesis (``tests/test_api_schema.py``): valid requests meet what exists, answers are noted.

``PARROT_URL`` and ``PARROT_MODEL`` are the service's; ``PARROT_ANSWERS`` names the file of answers.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import requests
import schemathesis
from schemathesis import Case, GenerationMode, HookContext, Response

URL = os.environ["PARROT_URL"] + "/v1"
CHANGING = ("/v1/session/{session_id}", "/v1/cancel", "/v1/set")  # each needs a session of its own
VARIABLES = {"/v1/get": "made", "/v1/cancel": "made", "/v1/set": "declared"}
connection = requests.Session()


def new_session() -> str:
    """A session with two variables: ``made`` by a call, and ``declared`` without a value."""
    session_id: str = connection.post(f"{URL}/session").json()["session_id"]
    call = {
        "prompt": "Say {{output:x}}",
        "placeholders": [{"name": "x", "kind": "output", "semantic_var_id": "made"}],
    }
    variables = [{"semantic_var_id": "declared"}]
    body = {"session_id": session_id, "submit_id": "first", "variables": variables, "calls": [call]}
    connection.post(f"{URL}/submit", json=body).raise_for_status()
    return session_id


@cache
def shared_session() -> str:
    """For what changes no session, and for submits."""
    return new_session()


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """Valid data alone would meet no session, variable or model: nobody guesses an id."""
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    changing = case.operation.path in CHANGING
    body = case.body if isinstance(case.body, dict) else {}
    for place in (body, case.path_parameters):
        if "session_id" in place:
            place["session_id"] = new_session() if changing else shared_session()
    if case.operation.path in VARIABLES:
        body["semantic_var_id"] = VARIABLES[case.operation.path]
        if "submit_id" in body:
            body["submit_id"] = "first"  # a get waits for another one
    if "model" in body:
        body["model"] = os.environ["PARROT_MODEL"]
    if "prompt" in body:
        body |= {"prompt": "Say", "max_tokens": 2}  # not ids, which this model may not have
    if body.get("criteria") == "DEADLINE":
        body["target_ms"] = 60_000.0  # a shorter one ends as 504, as it should
    if "create_session" in body:
        body["create_session"] = False


@schemathesis.hook
def after_call(context: HookContext, case: Case, response: Response) -> None:
    with open(os.environ["PARROT_ANSWERS"], "a") as answers:
        answers.write(f"{case.operation.label}\t{response.status_code}\n")
