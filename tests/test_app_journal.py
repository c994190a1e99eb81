"""The HTTP API with a journal, and submits that come again."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import httpx
import pytest

from app_harness import NOBODY, call_body, check_error, new_session, run
from manager_harness import Manager, running_manager, serving, until
from parrot import api
from parrot.config import ManagerConfig
from parrot.manager.clock import now_us
from parrot.manager.journal import Journal
from parrot.manager.operators import _compile_regex as transforms_compiled
from parrot.tokenizer import Tokenizer


def test_a_submit_that_comes_again_is_answered_again_and_runs_once(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        engine = await manager.add_engine(lambda _: "once")
        submit = {"session_id": NOBODY, "create_session": True, "submit_id": "mine", "calls": [call_body()]}
        first = await client.post("/v1/submit", json=submit)
        assert (await client.post("/v1/submit", json=submit)).json() == first.json()
        get = {"session_id": NOBODY, "semantic_var_id": "y"}
        assert (await client.post("/v1/get", json=get)).json()["value"] == "once"
        assert (await client.post("/v1/submit", json=submit)).json() == first.json()  # also when it has ended
        assert len(engine.dispatches) == 1
        other = {**submit, "calls": [call_body(), call_body(output="z")]}
        error = check_error(await client.post("/v1/submit", json=other), 409, "duplicate_request")
        assert error["param"] == "submit_id"
        again = {**submit, "submit_id": "another"}
        check_error(await client.post("/v1/submit", json=again), 409, "duplicate_request")

    run(tiny_model, scenario)


def test_a_live_request_id_is_a_duplicate_unless_the_submit_is_the_same(tiny_model: Path) -> None:
    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        session = await new_session(client)
        named = {**call_body(), "request_id": "mine"}
        submit = {"session_id": session, "submit_id": "one", "calls": [named]}
        assert (await client.post("/v1/submit", json=submit)).status_code == 200
        assert (await client.post("/v1/submit", json=submit)).status_code == 200
        again = {**submit, "submit_id": "two", "calls": [{**call_body(output="z"), "request_id": "mine"}]}
        error = check_error(await client.post("/v1/submit", json=again), 409, "duplicate_request")
        assert error["param"] == "request_id"

    run(tiny_model, scenario)


def test_with_a_journal_a_restarted_service_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    """What ended keeps its end, what had not runs again, and a submit whose answer was lost is known."""
    journal = tmp_path / "journal"
    chain = [
        call_body(),
        {
            "prompt": "Then {{input:y}} {{output:z}}",
            "placeholders": [
                {"name": "y", "kind": "input", "semantic_var_id": "y"},
                {"name": "z", "kind": "output", "semantic_var_id": "z"},
            ],
        },
    ]
    submit = {"session_id": NOBODY, "create_session": True, "submit_id": "mine", "calls": chain}
    submit["variables"] = [{"semantic_var_id": "set"}]
    replies: list[Any] = []

    def get(var_id: str) -> dict[str, Any]:
        return {"session_id": NOBODY, "semantic_var_id": var_id, "timeout_ms": 120_000, "criteria": "LATENCY"}

    async def before(manager: Manager, client: httpx.AsyncClient) -> None:
        def answer_once(_: str) -> str:
            engine.held = True
            return "first"

        engine = await manager.add_engine(answer_once)
        replies.append((await client.post("/v1/submit", json=submit)).json())
        assert replies[0]["durable"]
        body = {"session_id": NOBODY, "semantic_var_id": "set", "value": "by hand"}
        assert (await client.post("/v1/set", json=body)).status_code == 204
        assert (await client.post("/v1/get", json=get("y"))).json()["value"] == "first"
        pending = asyncio.create_task(client.post("/v1/get", json=get("z")))
        await until(lambda: len(engine.dispatches) == 2)
        manager.service.close()  # as SIGTERM does once the grace time is over
        check_error(await pending, 503, "stopping")
        check_error(await client.post("/v1/get", json=get("z")), 503, "stopping")
        check_error(await client.post("/v1/session"), 503, "stopping")

    async def after(manager: Manager, client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/submit", json=submit)).json() == replies[0]
        engine = await manager.add_engine(lambda _: "second")
        assert (await client.post("/v1/get", json=get("z"))).json()["value"] == "second"
        assert (await client.post("/v1/get", json=get("y"))).json()["value"] == "first"
        assert (await client.post("/v1/get", json=get("set"))).json()["value"] == "by hand"
        assert [prompt.split() for prompt in engine.prompts] == [["Then", "first"]]
        calls = (await client.get(f"/v1/session/{NOBODY}/graph")).json()["calls"]
        assert [call["state"] for call in calls] == ["done", "done"]
        assert (await client.delete(f"/v1/session/{NOBODY}")).status_code == 204

    async def at_last(manager: Manager, client: httpx.AsyncClient) -> None:
        check_error(await client.post("/v1/get", json=get("y")), 404, "session_not_found")

    for scenario in (before, after, at_last):
        run(tiny_model, scenario, journal=journal)


def test_an_application_keeps_its_place_over_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    arrivals, ended = list[int](), list[int]()

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        if not arrivals:
            body = {"session_id": NOBODY, "create_session": True, "calls": [call_body()]}
            assert (await client.post("/v1/submit", json=body)).status_code == 200
        application = manager.executor.application_of(manager.service._sessions.get(NOBODY))
        arrivals.append(application.arrival_us)
        ended.append(now_us())

    for _ in range(2):
        run(tiny_model, scenario, journal=tmp_path / "journal")
    assert arrivals[1] <= ended[0]


def test_no_request_is_answered_before_it_is_on_record(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_commit, tickets = asyncio.Event(), list[int]()
    committed = Journal.committed

    async def held_up(journal: Journal, ticket: int) -> None:
        tickets.append(ticket)
        await may_commit.wait()
        await committed(journal, ticket)

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        async def ask(method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
            may_commit.clear()
            tickets.clear()
            asked = asyncio.create_task(client.request(method, path, json=body))
            await until(lambda: asked.done() or bool(tickets))
            assert not asked.done(), path
            may_commit.set()
            reply = await asked
            assert reply.status_code < 300, reply.text
            return reply

        await manager.add_engine()
        session = (await ask("POST", "/v1/session")).json()["session_id"]
        variables = [{"semantic_var_id": "set"}, {"semantic_var_id": "idle"}]
        await ask(
            "POST", "/v1/submit", {"session_id": session, "calls": [call_body()], "variables": variables}
        )
        await ask("POST", "/v1/set", {"session_id": session, "semantic_var_id": "set", "value": "v"})
        await ask("POST", "/v1/cancel", {"session_id": session, "semantic_var_id": "idle"})
        await ask("POST", "/v1/get", {"session_id": session, "semantic_var_id": "y"})
        await ask("DELETE", f"/v1/session/{session}")

    monkeypatch.setattr(Journal, "committed", held_up)
    run(tiny_model, scenario, journal=tmp_path / "journal")


def test_while_the_journal_cannot_be_written_the_service_says_so_and_lives(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parrot.manager.journal._RETRY_S", 0.02)

    async def scenario(manager: Manager, client: httpx.AsyncClient) -> None:
        await manager.add_engine()
        session = await new_session(client)
        submit = {"session_id": session, "submit_id": "s", "calls": [call_body()]}
        submit["variables"] = [
            {"semantic_var_id": "big", "value": secrets.token_hex(100_000)},
            {"semantic_var_id": "idle"},
        ]
        other = await new_session(client)
        assert manager.journal is not None
        manager.journal._store.limit_pages(12)
        check_error(await client.post("/v1/submit", json=submit), 503, "journal_unavailable")
        refused = await client.post("/v1/session")
        check_error(refused, 503, "journal_unavailable")
        assert refused.headers["retry-after"] == "1"
        check_error(await client.get("/ready"), 503, "unavailable")
        assert (await client.get("/health")).status_code == 200
        get = {"session_id": session, "semantic_var_id": "y"}
        check_error(await client.post("/v1/get", json=get), 503, "journal_unavailable")
        cancel = {"session_id": session, "semantic_var_id": "idle"}
        check_error(await client.post("/v1/cancel", json=cancel), 503, "journal_unavailable")
        check_error(await client.delete(f"/v1/session/{other}"), 503, "journal_unavailable")
        manager.journal._store.limit_pages(0)
        await until(lambda: manager.journal is not None and manager.journal.problem is None)
        assert (await client.post("/v1/submit", json=submit)).status_code == 200
        assert (await client.post("/v1/get", json=get)).json()["status"] == "ready"

    run(tiny_model, scenario, journal=tmp_path / "journal")


def test_while_sessions_come_back_probes_are_answered_and_the_rest_waits(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A thousand patterns are compiled meanwhile."""
    patterns = [f"(a|b){{{number % 7 + 1}}}[c-x]+{number}" for number in range(1000)]
    fields: dict[str, Any] = {"model": str(tiny_model), "journal": tmp_path / "journal"}

    async def before() -> None:
        async with running_manager(tiny_model, journal=tmp_path / "journal") as manager:
            variables = [
                {
                    "semantic_var_id": f"d{number}",
                    "sources": [{"semantic_var_id": "v"}],
                    "transforms": [{"op": "regex", "pattern": pattern}],
                }
                for number, pattern in enumerate(patterns)
            ]
            variables.append({"semantic_var_id": "v", "value": "none of them"})
            body = {"session_id": NOBODY, "create_session": True, "variables": variables}
            manager.service.submit(api.SubmitBody.model_validate(body))
            await manager.service.saved()

    async def after() -> None:
        manager = Manager(ManagerConfig(**fields), Tokenizer.load(tiny_model))
        async with serving(manager) as url, httpx.AsyncClient(base_url=url, timeout=600) as client:
            assert (await client.get("/health")).status_code == 200
            error = check_error(await client.get("/ready"), 503, "unavailable")
            assert "being rebuilt" in error["message"]
            waiting = asyncio.create_task(client.get(f"/v1/session/{NOBODY}/graph"))
            recovery = asyncio.create_task(manager.service.recover())
            num_answers = 0
            while not recovery.done():
                assert (await client.get("/health")).status_code == 200
                num_answers += not recovery.done()
            await recovery
            assert num_answers >= 3
            assert len((await waiting).json()["variables"]) == 1001
            manager.service.close()
            await manager.registry.close()
            assert manager.journal is not None
            manager.journal.close()

    asyncio.run(before())
    transforms_compiled.cache_clear()
    asyncio.run(after())
