"""A manager with keys, and clients that have them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from manager_harness import Manager, running_manager, serving
from parrot.api import ErrorReply
from parrot.manager.key_store import add_operator_key, add_tenant_key


class Door:
    """A manager with keys of tenants a (weight 1) and b (weight 3) and of the operator, and its HTTP API."""

    def __init__(self, manager: Manager, url: str, path: Path, keys: dict[str, str]) -> None:
        self.manager, self.url, self.path, self.keys = manager, url, path, keys
        self.model = manager.service.config.model
        self.clients = {name: httpx.AsyncClient(base_url=url, timeout=120) for name in [*keys, "nobody"]}
        for name, key in keys.items():
            self.clients[name].headers["authorization"] = f"Bearer {key}"

    async def post(self, who: str, path: str, **body: Any) -> httpx.Response:
        return await self.clients[who].post(path, json=body)

    async def session(self, who: str) -> str:
        return str((await self.post(who, "/v1/session")).json()["session_id"])


def run(
    model: Path, path: Path, scenario: Callable[[Door], Awaitable[None]], **limits: dict[str, float]
) -> None:
    """The scenario, at the door of a manager whose file of keys, ``path``, was made with these limits."""
    limits = {"a": {}, "b": {"weight": 3.0}, **limits}
    keys = {name: add_tenant_key(path, name, limit) for name, limit in limits.items()}
    keys["operator"] = add_operator_key(path)

    async def main() -> None:
        async with running_manager(model, api_keys=path) as manager, serving(manager) as url:
            door = Door(manager, url, path, keys)
            await scenario(door)
            for client in door.clients.values():
                await client.aclose()

    asyncio.run(main())


def call_body(text: str = "hi", output: str = "y", **fields: Any) -> dict[str, Any]:
    hole = {"name": "y", "kind": "output", "semantic_var_id": output}
    return {"function": "say", "prompt": f"Say {text} {{{{output:y}}}}", "placeholders": [hole], **fields}


def error_code(reply: httpx.Response) -> str:
    return ErrorReply.model_validate(reply.json()).error.code
