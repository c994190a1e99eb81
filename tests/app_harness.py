"""The HTTP API of a manager in this process, and what a client sends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from manager_harness import Manager, running_manager, serving
from parrot.api import ErrorReply

Scenario = Callable[[Manager, httpx.AsyncClient], Awaitable[None]]
NOBODY = "s-" + "0" * 32  # a session that is not there


def run(model: Path, scenario: Scenario, **config: object) -> None:
    """The scenario, with a manager that has no engine yet and a client of it."""

    async def main() -> None:
        async with (
            running_manager(model, **config) as manager,
            serving(manager) as url,
            httpx.AsyncClient(base_url=url, timeout=120) as client,
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
