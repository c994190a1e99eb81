"""Prefixes of calls whose structure nobody declared: found at ends of messages, and every 128 tokens.

A real manager with its HTTP API, two real engines with a tiny model. A first request is made while the first
engine is busy, so that it runs on the second; whatever shares nothing with it would go to the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from graph_builder import prompt_call, write
from manager_harness import Manager, running_manager, serving, until
from parrot import api
from parrot.config import SchedulerConfig
from test_uses import real_engine

pytestmark = pytest.mark.system
SYSTEM = (
    "You answer questions about ships, harbours and the sea in one short sentence, and you never guess. " * 2
)
STORY = " ".join(f"chapter {number} tells of the sea" for number in range(60))


class Client:
    """Asks one after the other; knows which engine ran the last call."""

    def __init__(self, manager: Manager, http: httpx.AsyncClient) -> None:
        self._manager = manager
        self._http = http

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._http.post(path, json={"model": self.model, "max_tokens": 6, **body})
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    @property
    def model(self) -> str:
        return self._manager.executor.config.model

    async def chat(self, *contents: str) -> tuple[str, int, int]:
        """Answer, prompt tokens and cached tokens of a chat: system, user, assistant, user, ..."""
        roles = ["system", *("user", "assistant") * len(contents)]
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        answer = await self.post("/v1/chat/completions", {"messages": messages})
        return answer["choices"][0]["message"]["content"], *_tokens(answer)

    async def complete(self, prompt: str | list[int]) -> tuple[int, int]:
        """Prompt tokens and cached tokens of a completion."""
        return _tokens(await self.post("/v1/completions", {"prompt": prompt}))

    async def engine(self) -> str:
        """That of the last call that ended."""
        calls = (await self._http.get("/v1/calls")).json()["calls"]
        return str(calls[-1]["engine"])

    @asynccontextmanager
    async def first_engine_busy(self) -> AsyncIterator[None]:
        sampling = api.SamplingBody(max_tokens=2000, ignore_eos=True)
        call = prompt_call("busy", "Go on {{output:x}}", write("x", sampling=sampling))
        session = self._manager.submit(call)
        await until(lambda: self._manager.registry.alive[0].num_dispatched == 1)
        yield
        self._manager.service.delete_session(session)
        await until(lambda: self._manager.registry.alive[0].num_dispatched == 0)


def _tokens(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def run(model: Path, scenario: Callable[[Client], Awaitable[None]], **switches: bool) -> None:
    async def main() -> None:
        config = SchedulerConfig(**switches)
        async with running_manager(model, scheduler=config) as manager, serving(manager) as url:
            with ExitStack() as stack:
                for number in range(2):
                    address = manager.registry.address
                    stack.enter_context(real_engine(model, address, 256, f"engine-{number}"))
                    await until(lambda wanted=number + 1: len(manager.registry.alive) == wanted)
                async with httpx.AsyncClient(base_url=url, timeout=120) as http:
                    await scenario(Client(manager, http))

    asyncio.run(main())


def test_chats_with_one_system_prompt_go_to_the_engine_that_has_it(tiny_model: Path) -> None:
    async def scenario(client: Client) -> None:
        async with client.first_engine_busy():
            assert (await client.chat(SYSTEM, "What is a quay?"))[2] == 0
            assert await client.engine() == "engine-1"
        _, num_prompt, cached = await client.chat(SYSTEM, "How deep is the sea?")
        assert await client.engine() == "engine-1"
        assert num_prompt - 40 < cached < num_prompt
        assert (await client.chat("You are somebody else.", "How deep is the sea?"))[2] < 20

    run(tiny_model, scenario)


def test_a_growing_conversation_is_found_up_to_its_last_turn(tiny_model: Path) -> None:
    async def scenario(client: Client) -> None:
        async with client.first_engine_busy():
            turns = [SYSTEM, "What is a quay?"]
            answer, before, _ = await client.chat(*turns)
        for question in ("And a pier?", "Who builds them?"):
            turns += [answer, question]
            answer, num_prompt, cached = await client.chat(*turns)
            assert await client.engine() == "engine-1"
            assert before - 8 <= cached < num_prompt
            before = num_prompt

    run(tiny_model, scenario)


@pytest.mark.parametrize("as_ids", [False, True])
def test_raw_prompts_are_found_on_a_grid(tiny_model: Path, as_ids: bool) -> None:
    async def scenario(client: Client) -> None:
        encode = client._manager.tokenizer.encode
        prompts = [f"{STORY} and then {end}" for end in ("he slept", "she woke up early")]
        asked = [[int(token) for token in encode(prompt)] for prompt in prompts] if as_ids else prompts
        async with client.first_engine_busy():
            await client.complete(asked[0])
            assert await client.engine() == "engine-1"
        num_prompt, cached = await client.complete(asked[1])
        assert await client.engine() == "engine-1"
        assert num_prompt > 256
        assert num_prompt - 20 < cached < num_prompt, "the engine extends what the grid found, to the token"

    run(tiny_model, scenario)


def test_without_affinity_nobody_looks_where_a_prefix_is(tiny_model: Path) -> None:
    async def scenario(client: Client) -> None:
        async with client.first_engine_busy():
            await client.chat(SYSTEM, "What is a quay?")
        assert (await client.chat(SYSTEM, "How deep is the sea?"))[2] == 0
        assert await client.engine() == "engine-0"

    run(tiny_model, scenario, prefix_affinity=False)
