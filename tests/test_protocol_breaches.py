"""Replies that an engine which keeps to the protocol cannot send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import msgspec
import pytest

from graph_builder import prompt_call
from manager_harness import Manager, ScriptedEngine, run, serving, until
from parrot import errors, wire

CALL = prompt_call("only", "Say {{output:a}} and {{output:b}}")
Change = Callable[[Sequence[wire.Reply]], Sequence[wire.Reply]]


def _without_outputs(replies: Sequence[wire.Reply]) -> Sequence[wire.Reply]:
    return [reply for reply in replies if not isinstance(reply, wire.GenerateDone)]


def _without_the_last(replies: Sequence[wire.Reply]) -> Sequence[wire.Reply]:
    last = [reply for reply in replies if isinstance(reply, wire.GenerateDone)][-1]
    return [reply for reply in replies if reply is not last]


def _each_output_with(**fields: object) -> Change:
    return lambda replies: [
        msgspec.structs.replace(reply, **fields) if isinstance(reply, wire.GenerateDone) else reply
        for reply in replies
    ]


def _outputs_reversed(replies: Sequence[wire.Reply]) -> Sequence[wire.Reply]:
    outputs = [reply for reply in replies if isinstance(reply, wire.GenerateDone)]
    return [outputs.pop() if isinstance(reply, wire.GenerateDone) else reply for reply in replies]


BREACHES: list[Change] = [
    _without_outputs,
    _without_the_last,
    _outputs_reversed,
    _each_output_with(verb=0),
    _each_output_with(verb=1),
    _each_output_with(verb=2**40),
    _each_output_with(token_ids=b"abc"),
    _each_output_with(token_ids=wire.pack_ids([2**31 - 1])),
    _each_output_with(token_ids=wire.pack_ids([-1])),
    _each_output_with(logprobs=wire.Logprobs(2**40, b"1234", b"1234", b"", b"")),
    _each_output_with(prompt_logprobs=wire.Logprobs(0, b"1234", b"", b"", b"")),
]


async def answer_wrongly(engine: ScriptedEngine, change: Change, number: int) -> None:
    await until(lambda: len(engine.dispatches) > number)
    await engine.send(*change(engine._replies(engine.dispatches[number])))


@pytest.mark.parametrize("change", BREACHES)
def test_a_call_whose_reply_is_wrong_runs_again_elsewhere(tiny_model: Path, change: Change) -> None:
    async def scenario(manager: Manager) -> None:
        wrong = await manager.add_engine(held=True)
        session = manager.submit(CALL)
        await until(lambda: len(wrong.dispatches) == 1)
        right = await manager.add_engine(lambda _: "fine", name="engine-1")
        await answer_wrongly(wrong, change, 0)
        assert await manager.get(session, "b") == "fine"
        assert manager.executor.replies.num_breaches >= 1
        assert (len(wrong.dispatches), len(right.dispatches)) == (1, 1)
        manager.check_at_rest()

    run(tiny_model, scenario)


@pytest.mark.parametrize("change", [_without_outputs, _each_output_with(verb=2**40)])
def test_one_that_is_always_wrong_uses_up_the_retries(tiny_model: Path, change: Change) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(CALL)
        for number in range(3):
            await answer_wrongly(engine, change, number)
        with pytest.raises(errors.EngineLost, match="lost with engine engine-0") as caught:
            await manager.get(session, "a")
        assert "breaks the protocol" in caught.value.causes[0].message
        manager.check_at_rest()

    run(tiny_model, scenario)


@pytest.mark.parametrize("code", ["session_not_found", "internal", "rate_limit_exceeded", "no such code", ""])
def test_codes_and_messages_of_engines_are_bounded(tiny_model: Path, code: str) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(CALL)
        await until(lambda: len(engine.dispatches) == 1)
        cause = errors.ErrorInfo(code, "y" * 100_000)
        info = errors.ErrorInfo(code, "x" * 100_000, "p" * 100_000, (cause,) * 1000)
        await engine.send(wire.CallFailed(engine.dispatches[0].call_id, info))
        async with serving(manager) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
            body = {"session_id": session, "semantic_var_id": "a", "timeout_ms": 120_000}
            reply = await client.post("/v1/get", json=body)
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "engine_error"
        assert len(reply.content) < 4096

    run(tiny_model, scenario)
