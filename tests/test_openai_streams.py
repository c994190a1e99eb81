"""Streams of the OpenAI routes: how they end, what a lost engine changes, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from manager_harness import Manager, until
from openai_harness import HELLO, reply, run
from parrot import wire
from parrot.errors import ErrorInfo


def test_a_stream_ends_with_the_reason_then_usage_then_done(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        await manager.add_engine(reply)
        stream = await client.chat.completions.create(
            model=model, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "Hi there"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert (chunks[-1].choices, chunks[-1].usage is not None) == ([], True)
        body = {"model": model, "messages": HELLO, "stream": True}
        async with httpx.AsyncClient(timeout=120) as plain:
            raw = await plain.post(f"{client.base_url}chat/completions", json=body)
        lines = [line for line in raw.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "stop"
        assert "usage" not in last
        assert json.loads(lines[1].removeprefix("data: "))["choices"][0]["finish_reason"] is None

    run(tiny_model, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_generation_with_one_line_in_the_log(
    tiny_model: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        engine = await manager.add_engine(held=True)
        request = asyncio.create_task(
            client.chat.completions.create(model=model, messages=HELLO, stream=stream)  # type: ignore[call-overload]
        )
        await until(lambda: len(engine.dispatches) == 1)
        if stream:
            await (await request).close()
        else:
            request.cancel()
        run_id = engine.dispatches[0].call_id
        await until(lambda: wire.Abort((run_id,)) in engine.other)
        manager.check_at_rest()
        lines = [record.message for record in caplog.records if "stop" in record.message]
        assert len(lines) == 1
        assert "client left" in lines[0]

    with caplog.at_level(logging.INFO, logger="parrot"):
        run(tiny_model, scenario)


def test_a_stream_goes_on_with_the_same_text_after_its_engine_was_lost(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        first = await manager.add_engine(held=True)
        stream = await client.chat.completions.create(model=model, messages=HELLO, stream=True)
        await until(lambda: len(first.dispatches) == 1)
        await first.send(wire.Chunk(first.dispatches[0].call_id, 1, "Hi t"))
        await first.die()
        await manager.add_engine(reply, name="engine-1")
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "Hi there"

    run(tiny_model, scenario)


def test_a_failure_in_a_stream_reaches_the_client_as_an_error(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        engine = await manager.add_engine(held=True)
        stream = await client.chat.completions.create(model=model, messages=HELLO, stream=True)
        await until(lambda: len(engine.dispatches) == 1)
        info = ErrorInfo("engine_error", "the step failed")
        await engine.send(wire.CallFailed(engine.dispatches[0].call_id, info))
        with pytest.raises(openai.APIError, match="the step failed"):
            async for _ in stream:
                pass

    run(tiny_model, scenario)


def test_a_client_that_leaves_stops_all_its_answers(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        engine = await manager.add_engine(held=True)
        request = asyncio.create_task(client.chat.completions.create(model=model, messages=HELLO, n=2))
        await until(lambda: len(engine.dispatches) == 2)
        request.cancel()
        wanted = {dispatch.call_id for dispatch in engine.dispatches}

        def aborted() -> set[int]:
            return {
                i for message in engine.other if isinstance(message, wire.Abort) for i in message.call_ids
            }

        await until(lambda: aborted() == wanted)
        manager.check_at_rest()

    run(tiny_model, scenario)


def some_logprobs(ids: list[int]) -> wire.Logprobs:
    """Each id with -0.5 and, as the two best, itself and its successor."""
    values = np.array([-0.5] * len(ids), dtype="<f4").tobytes()
    top = [other for token in ids for other in (token, token + 1)]
    top_values = np.array([-0.5, -1.5] * len(ids), dtype="<f4").tobytes()
    return wire.Logprobs(2, wire.pack_ids(ids), values, wire.pack_ids(top), top_values)


def test_streamed_logprobs_come_once_each_also_when_the_engine_is_lost(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: openai.AsyncOpenAI, model: str) -> None:
        first = await manager.add_engine(held=True)
        ids = [int(token) for token in manager.tokenizer.encode("Hi there")]
        stream = await client.chat.completions.create(
            model=model, messages=HELLO, stream=True, logprobs=True, top_logprobs=2
        )
        await until(lambda: len(first.dispatches) == 1)
        head = some_logprobs(ids[:2])
        text = manager.tokenizer.decode(ids[:2])
        await first.send(wire.Chunk(first.dispatches[0].call_id, 1, text, head))
        await first.die()
        second = await manager.add_engine(held=True, name="engine-1")
        await until(lambda: len(second.dispatches) == 1)
        call_id = second.dispatches[0].call_id
        timing = wire.Timing(1, 1, 1, 1)
        done = wire.GenerateDone(
            call_id, 1, "Hi there", wire.pack_ids(ids), len(ids), "stop", timing, some_logprobs(ids)
        )
        await second.send(done, wire.CallDone(call_id, wire.ContextId(1), 9))
        entries = []
        async for chunk in stream:
            if chunk.choices[0].logprobs is not None:
                entries += chunk.choices[0].logprobs.content or []
        assert b"".join(bytes(entry.bytes or []) for entry in entries) == b"Hi there"
        assert [len(entry.top_logprobs) for entry in entries] == [2] * len(ids)
        assert {entry.logprob for entry in entries} == {-0.5}

    run(tiny_model, scenario)
