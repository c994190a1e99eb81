"""Gets that come before their submit: they wait for it, within limits, and end as it ends."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from app_harness import call_body, check_error, new_session, run
from manager_harness import Manager, until
from parrot.errors import ErrorInfo, PromptTooLong
from parrot.manager import early_gets
from parrot.manager.early_gets import EarlyGets, SubmitKey

SESSION = "s-" + "a" * 32


def get_body(submit_id: str = "one", **fields: Any) -> dict[str, Any]:
    return {"session_id": SESSION, "semantic_var_id": "y", "submit_id": submit_id, **fields}


def submit_body(**fields: Any) -> dict[str, Any]:
    body = {"session_id": SESSION, "submit_id": "one", "create_session": True, "calls": [call_body()]}
    return {**body, **fields}


async def early(manager: Manager, client: httpx.AsyncClient, **fields: Any) -> asyncio.Task[httpx.Response]:
    """A get that has arrived and waits for its submit."""
    waiting = manager.service._early_gets._num_waiting
    before = waiting.total()
    task = asyncio.create_task(client.post("/v1/get", json=get_body(**fields)))
    await until(lambda: task.done() or waiting.total() == before + 1)
    return task


def test_a_get_may_come_before_its_submit_and_its_session(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        await manager.add_engine(lambda text: text.split()[-1])
        first, second = [await early(manager, client, criteria="THROUGHPUT") for _ in range(2)]
        assert (await client.post("/v1/submit", json=submit_body())).status_code == 200
        for task in (first, second):
            assert (await task).json()["value"] == "hi"
        graph = (await client.get(f"/v1/session/{SESSION}/graph")).json()
        assert graph["calls"][0]["objective"] == "THROUGHPUT"
        assert not manager.service._early_gets._waiters
        assert not manager.service._early_gets._num_waiting

    run(tiny_model, scenario)


def test_a_get_after_its_submit_waits_for_the_variable_alone(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        await client.post("/v1/submit", json=submit_body())
        reply = await client.post("/v1/get", json=get_body(timeout_ms=0))
        assert reply.json()["status"] == "pending"

    run(tiny_model, scenario)


def test_a_refused_submit_ends_its_gets_with_its_error(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        waiting = await early(manager, client)
        calls = [{**call_body(), "model": "other"}]
        check_error(await client.post("/v1/submit", json=submit_body(calls=calls)), 404, "model_not_found")
        check_error(await waiting, 404, "model_not_found")

    run(tiny_model, scenario)


def test_a_get_whose_submit_does_not_come_is_not_found_when_its_time_is_over(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        begin = time.monotonic()
        reply = await client.post("/v1/get", json=get_body(timeout_ms=200))
        check_error(reply, 404, "session_not_found")
        assert time.monotonic() - begin >= 0.2
        session = await new_session(client)
        reply = await client.post("/v1/get", json=get_body(session_id=session, timeout_ms=0))
        check_error(reply, 404, "variable_not_found")

    run(tiny_model, scenario)


def test_a_get_without_a_limit_waits_for_its_submit_no_longer_than_that_may_take(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_gets, "LONGEST_S", 0.1)

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        check_error(await client.post("/v1/get", json=get_body()), 404, "session_not_found")

    run(tiny_model, scenario)


def test_the_wait_for_the_submit_is_part_of_the_time_of_the_get(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        begin = time.monotonic()
        waiting = await early(manager, client, timeout_ms=2000)
        await asyncio.sleep(1.5)
        await client.post("/v1/submit", json=submit_body())  # and no engine is there
        assert (await waiting).json()["status"] == "pending"
        assert time.monotonic() - begin < 3.4

    run(tiny_model, scenario)


def test_no_more_than_so_many_gets_of_a_tenant_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_gets, "MAX_WAITING", 2)

    async def scenario() -> None:
        gets = EarlyGets()
        mine = [SubmitKey("me", SESSION, name) for name in ("one", "two", "three")]
        tasks = [asyncio.create_task(gets.wait(submit, None)) for submit in mine]
        await asyncio.wait(tasks[2:])  # at once
        other = asyncio.create_task(gets.wait(SubmitKey("other", SESSION, "one"), None))
        await asyncio.sleep(0)
        gets.wake(mine[0])
        await tasks[0]
        assert [task.done() for task in (*tasks, other)] == [True, False, True, False]
        tasks[1].cancel()  # its client has left
        await asyncio.wait(tasks)
        gets.close(ErrorInfo("prompt_too_long", "too long"))
        with pytest.raises(PromptTooLong):
            await other
        assert not gets._waiters
        assert not gets._num_waiting

    asyncio.run(scenario())


def test_the_end_of_the_service_ends_gets_that_wait_for_a_submit(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        waiting = await early(manager, client)
        manager.service.close()
        check_error(await waiting, 503, "unavailable")
        check_error(await client.post("/v1/get", json=get_body()), 503, "unavailable")

    run(tiny_model, scenario)
