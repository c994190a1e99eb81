"""What the OpenAI routes refuse, as the errors that OpenAI's client knows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from manager_harness import Manager, until
from openai_harness import HELLO, reply, run
from parrot import wire
from parrot.config import SchedulerConfig
from parrot.errors import ErrorInfo

IMPOSSIBLE = {"type": "string", "minLength": 5, "maxLength": 2}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"extra_body": {"logprobs": 0}}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"extra_body": {"repetition_penalty": 5e-324}}, "repetition_penalty"),
        ({"logit_bias": {"9" * 5000: 1}}, f"logit_bias.{'9' * 64}.[key]"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 8}, "min_tokens"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, None),
        ({"extra_body": {"stop_token_ids": [999999]}}, "stop_token_ids"),
        ({"extra_body": {"stop_token_ids": [-1]}}, None),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
        ({"response_format": {"type": "json_schema"}}, None),
        ({"response_format": {"type": "json_object"}, "stop": ["x"]}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": IMPOSSIBLE}}},
            "response_format",
        ),
        ({"extra_body": {"best_of_three": 1}}, "best_of_three"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tiny_model: Path, fields: dict[str, Any], param: str | None
) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{"model": model, "messages": HELLO, **fields})
        assert param is None or caught.value.param == param

    run(tiny_model, scenario)


def test_errors_are_the_clients_own_types(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        await manager.add_engine(reply)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="1024 tokens"):
            await client.completions.create(model=model, prompt="word " * 3000)
        with pytest.raises(openai.BadRequestError, match="empty"):
            await client.completions.create(model=model, prompt="")
        with pytest.raises(openai.BadRequestError, match="outside"):
            await client.completions.create(model=model, prompt=[10**6])
        models = await client.models.list()
        assert [card.id for card in models.data] == [model]

    run(tiny_model, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429_also_of_a_stream(tiny_model: Path, stream: bool) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        engine = await manager.add_engine(held=True)
        with pytest.raises(openai.RateLimitError, match="max_queued = 1") as caught:
            await client.chat.completions.create(  # type: ignore[call-overload]
                model=model, messages=HELLO, n=128, stream=stream, max_tokens=200
            )
        assert int(caught.value.response.headers["retry-after"]) > 0
        await until(lambda: not manager.executor.dispatcher.num_busy)
        assert len(engine.dispatches) < 128
        manager.check_at_rest()

    run(tiny_model, scenario, scheduler=SchedulerConfig(max_queued=1))


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_the_engine_refuses_is_named_as_the_client_gave_it(
    tiny_model: Path, stream: bool
) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        engine = await manager.add_engine(held=True)
        request = asyncio.create_task(
            client.chat.completions.create(  # type: ignore[call-overload]
                model=model, messages=HELLO, response_format={"type": "json_object"}, stream=stream
            )
        )
        await until(lambda: len(engine.dispatches) == 1)
        info = ErrorInfo("invalid_request", "schema cannot be enforced: too complex", "schema")
        await engine.send(wire.CallFailed(engine.dispatches[0].call_id, info))
        with pytest.raises(openai.APIError, match="response_format: schema cannot be enforced") as caught:
            async for _ in await request:
                pass
        assert caught.value.param == "response_format"

    run(tiny_model, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_impossible_schema_is_refused_before_a_stream_begins(tiny_model: Path, stream: bool) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        format_: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": IMPOSSIBLE}}
        with pytest.raises(openai.BadRequestError, match="minLength") as caught:
            await client.chat.completions.create(
                model=model, messages=HELLO, response_format=format_, stream=stream
            )
        assert caught.value.param == "response_format"
        manager.check_at_rest()

    run(tiny_model, scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"extra_body": {"logprobs": False}}, "logprobs"),
    ],
)
def test_completions_refuse_by_name_what_they_cannot_do(
    tiny_model: Path, fields: dict[str, Any], param: str
) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**{"model": model, "prompt": "Hi", **fields})
        assert caught.value.param == param

    run(tiny_model, scenario)
