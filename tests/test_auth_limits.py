"""Limits and weights of tenants at the HTTP API: what is refused for how long, and who is served first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from auth_harness import Door, call_body, error_code, run
from manager_harness import until
from parrot.manager.key_file import new_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_used_up_limits_are_429s_that_say_when(tiny_model: Path, path: Path) -> None:
    async def scenario(door: Door) -> None:
        engine = await door.manager.add_engine()
        engine.held = True
        session = await door.session("calls")
        many = [call_body(output=f"y{i}") for i in range(3)]
        reply = await door.post("calls", "/v1/submit", session_id=session, calls=many)
        assert (reply.status_code, error_code(reply)) == (413, "request_too_large")
        reply = await door.post("calls", "/v1/submit", session_id=session, calls=many[:2])
        assert reply.status_code == 200
        reply = await door.post("calls", "/v1/submit", session_id=session, calls=many[2:])
        assert (reply.status_code, error_code(reply)) == (429, "rate_limit_exceeded")
        assert reply.json()["error"]["param"] == "max_concurrent_calls"
        await until(lambda: len(engine.dispatches) == 2)
        await engine.answer(engine.dispatches[0])
        await door.post("calls", "/v1/get", session_id=session, semantic_var_id="y0")
        await door.post("calls", "/v1/get", session_id=session, semantic_var_id="y0")
        reply = await door.post("calls", "/v1/submit", session_id=session, calls=many[2:])
        assert reply.status_code == 200

        session = await door.session("requests")
        await door.post("requests", "/v1/submit", session_id=session, calls=[call_body()])
        reply = await door.post("requests", "/v1/get", session_id=session, semantic_var_id="y", timeout_ms=0)
        assert (reply.status_code, error_code(reply)) == (429, "rate_limit_exceeded")
        assert reply.json()["error"]["param"] == "requests_per_minute"
        assert int(reply.headers["retry-after"]) in (29, 30)
        # What gives back is never refused.
        reply = await door.post("requests", "/v1/cancel", session_id=session, semantic_var_id="y")
        assert reply.status_code == 204
        assert (await door.clients["requests"].delete(f"/v1/session/{session}")).status_code == 204
        text = (await door.clients["operator"].get("/metrics")).text
        assert 'parrot_tenant_refused_total{limit="max_concurrent_calls",tenant="calls"} 1.0\n' in text
        assert 'parrot_tenant_refused_total{limit="requests_per_minute",tenant="requests"} 1.0\n' in text

    limits: dict[str, dict[str, float]] = {
        "calls": {"max_concurrent_calls": 2},
        "requests": {"requests_per_minute": 2},
    }
    run(tiny_model, path, scenario, **limits)


def test_tokens_that_were_used_refuse_the_next_calls(tiny_model: Path, path: Path) -> None:
    async def scenario(door: Door) -> None:
        await door.manager.add_engine()
        fields: dict[str, Any] = {"model": door.model, "prompt": "x " * 50, "max_tokens": 1}
        assert (await door.post("few", "/v1/completions", **fields)).status_code == 200
        reply = await door.post("few", "/v1/completions", **fields)
        assert reply.status_code == 429
        assert reply.json()["error"]["param"] == "tokens_per_minute"
        # Values and labels cost no tokens, so a running application can go on to its end.
        assert (await door.post("few", "/v1/session")).status_code == 200

    run(tiny_model, path, scenario, few={"tokens_per_minute": 20})


def test_the_openai_client_sees_its_own_error_types(tiny_model: Path, path: Path) -> None:
    async def scenario(door: Door) -> None:
        await door.manager.add_engine()
        options: dict[str, Any] = {"base_url": f"{door.url}/v1", "max_retries": 0}
        ask: dict[str, Any] = {"model": door.model, "messages": [{"role": "user", "content": "Hello"}]}
        async with openai.AsyncOpenAI(api_key=new_key(), **options) as stranger:
            with pytest.raises(openai.AuthenticationError, match="this API key is not known here") as unknown:
                await stranger.chat.completions.create(**ask)
            assert unknown.value.code == "invalid_api_key"
        async with openai.AsyncOpenAI(api_key=door.keys["operator"], **options) as operator:
            with pytest.raises(openai.PermissionDeniedError):
                await operator.chat.completions.create(**ask)
        async with openai.AsyncOpenAI(api_key=door.keys["two"], **options) as client:
            answer = await client.chat.completions.create(**ask, n=2)
            assert [choice.message.content for choice in answer.choices] == ["ok", "ok"]
            assert [model.id async for model in client.models.list()] == [door.model]
            with pytest.raises(openai.APIStatusError, match="max_concurrent_calls = 2") as too_many:
                await client.chat.completions.create(**ask, n=3)
            assert too_many.value.status_code == 413
            with pytest.raises(openai.RateLimitError, match="requests_per_minute = 3") as limited:
                await client.chat.completions.create(**ask)
            assert limited.value.code == "rate_limit_exceeded"

    run(tiny_model, path, scenario, two={"max_concurrent_calls": 2, "requests_per_minute": 3})


def test_tenants_get_work_placed_by_their_weights(tiny_model: Path, path: Path) -> None:
    async def scenario(door: Door) -> None:
        sessions = {who: await door.session(who) for who in ("a", "b")}
        for who, session in sessions.items():
            calls = [call_body(f"word {i:02}", f"y{i}") for i in range(24)]
            reply = await door.post(who, "/v1/submit", session_id=session, calls=calls)
            assert reply.status_code == 200
        engine = await door.manager.add_engine(max_batch_size=1)
        await until(lambda: len(engine.dispatches) == 48, 10)
        number = door.manager.service.tenants.get("b").number
        placed = [dispatch.domain == number for dispatch in engine.dispatches]
        assert [sum(placed[i : i + 8]) for i in range(0, 32, 8)] == [6] * 4  # b has three turns in four

    run(tiny_model, path, scenario)
