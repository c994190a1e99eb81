"""OpenAI's client before a manager in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai

from manager_harness import Manager, running_manager, serving

Scenario = Callable[[Manager, openai.AsyncOpenAI, str], Awaitable[None]]
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def run(model: Path, scenario: Scenario, **config: object) -> None:
    """The scenario, with a manager that has no engine yet, a client of it, and the model's name."""

    async def main() -> None:
        async with (
            running_manager(model, **config) as manager,
            serving(manager) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            await scenario(manager, client, str(model))

    asyncio.run(main())


def reply(_: str) -> str:
    return "Hi there"
