"""Keys at the door: who gets in where, as whom, how often, and what a stranger learns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from auth_harness import Door, call_body, error_code, run
from manager_harness import running_manager, until
from parrot.config import ManagerConfig
from parrot.errors import ConfigError, InternalError
from parrot.manager.app import create_app
from parrot.manager.executor import Executor
from parrot.manager.key_file import new_key
from parrot.manager.server import run_manager
from parrot.manager.service import Service

SESSION = "s-" + "0" * 32


# Who opens each route: nobody's, a tenant's or an operator's key. A new route must be put here.
AUDIENCE = {
    "/health": "nobody tenant operator",
    "/ready": "nobody tenant operator",
    "/metrics": "operator",
    "/v1/engines": "operator",
    "/v1/calls": "tenant operator",
    "/v1/models": "tenant operator",
    "/docs": "tenant operator",
    "/docs/oauth2-redirect": "tenant operator",
    "/redoc": "tenant operator",
    "/openapi.json": "tenant operator",
    "/v1/session": "tenant",
    "/v1/session/{session_id}": "tenant",
    "/v1/session/{session_id}/graph": "tenant",
    "/v1/submit": "tenant",
    "/v1/get": "tenant",
    "/v1/set": "tenant",
    "/v1/cancel": "tenant",
    "/v1/completions": "tenant",
    "/v1/chat/completions": "tenant",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_every_route_opens_to_those_it_is_for(tiny_model: Path, path: Path) -> None:
    async def scenario(door: Door) -> None:
        await door.manager.add_engine()
        app = create_app(door.manager.service, door.manager.registry)
        own = [(route, method.upper()) for route, verbs in app.openapi()["paths"].items() for method in verbs]
        pages = [(route.path, "GET") for route in app.routes if isinstance(route, Route)]
        routes = list(dict.fromkeys(own + pages))
        assert {path for path, _ in routes} == set(AUDIENCE)
        assert app.openapi()["security"] == [{"key": []}]
        assert "401" in app.openapi()["paths"]["/v1/submit"]["post"]["responses"]
        for who, client in door.clients.items():
            kind = who if who in ("nobody", "operator") else "tenant"
            for route, method in routes:
                reply = await client.request(method, route.replace("{session_id}", SESSION), json={})
                if kind in AUDIENCE[route].split():
                    assert reply.status_code not in (401, 403), (who, route, reply.text)
                    continue
                expected = (401, "invalid_api_key") if kind == "nobody" else (403, "permission_denied")
                assert (reply.status_code, error_code(reply)) == expected, (who, route)
                assert ("www-authenticate" in reply.headers) == (kind == "nobody")

    run(tiny_model, path, scenario)


def test_only_one_bearer_token_that_is_a_whole_known_key_opens(tiny_model: Path, path: Path) -> None:
    async def scenario(door: Door) -> None:
        key, client = door.keys["a"], door.clients["nobody"]
        wrong: list[Any] = [
            {"Authorization": key},
            {"Authorization": f"Basic {key}"},
            {"Authorization": f"Bearer {key}x"},
            {"Authorization": f"Bearer {key[:-1]}"},
            {"Authorization": f"Bearer {new_key()}"},
            {"Authorization": b"Bearer \xff\xfe"},
            {"X-Api-Key": key},
            [("Authorization", f"Bearer {key}"), ("Authorization", f"Bearer {new_key()}")],
        ]
        for headers in wrong:
            reply = await client.post("/v1/session", headers=headers, params={"api_key": key})
            assert (reply.status_code, error_code(reply)) == (401, "invalid_api_key"), headers
            assert key[:20] not in reply.text
        for scheme in ("Bearer", "bearer", "BEARER "):
            reply = await client.post("/v1/session", headers={"Authorization": f"{scheme} {key}"})
            assert reply.status_code == 200

    run(tiny_model, path, scenario)


def test_a_strangers_body_is_not_read(tiny_model: Path, path: Path) -> None:
    async def scenario(door: Door) -> None:
        host, port = door.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/submit HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 60)
        writer.close()

    run(tiny_model, path, scenario)


def test_the_tenant_is_the_keys_whatever_the_request_says(tiny_model: Path, path: Path) -> None:
    async def scenario(door: Door) -> None:
        engine = await door.manager.add_engine()
        client = door.clients["a"]
        named = {"X-Tenant": "b", "X-Tenant-Id": "b", "OpenAI-Organization": "b"}
        session = (await client.post("/v1/session?tenant=b", headers=named)).json()["session_id"]
        for field in ("tenant", "domain", "api_key"):
            body = {"session_id": session, "calls": [call_body()], field: "b"}
            reply = await client.post("/v1/submit", json=body, headers=named)
            assert (reply.status_code, error_code(reply)) == (400, "invalid_request")
        await door.post("a", "/v1/submit", session_id=session, calls=[call_body()])
        await door.post("a", "/v1/completions", model=door.model, prompt="x", user="b", max_tokens=1)
        await until(lambda: len(engine.dispatches) == 2)
        tenants = door.manager.service.tenants
        assert {dispatch.domain for dispatch in engine.dispatches} == {tenants.get("a").number}

    run(tiny_model, path, scenario)


def test_foreign_sessions_and_variables_answer_as_unknown_ones_do(tiny_model: Path, path: Path) -> None:
    async def scenario(door: Door) -> None:
        await door.manager.add_engine()
        mine = await door.session("a")
        await door.post("a", "/v1/submit", session_id=mine, calls=[call_body()])
        one = {"semantic_var_id": "y"}
        requests: list[tuple[str, str, dict[str, Any] | None]] = [
            ("POST", "/v1/submit", {"calls": [call_body(output="z")]}),
            ("POST", "/v1/get", {**one, "timeout_ms": 0}),
            ("POST", "/v1/set", {**one, "value": "v"}),
            ("POST", "/v1/cancel", one),
            ("GET", "/v1/session/{}/graph", None),
            ("DELETE", "/v1/session/{}", None),
        ]
        for method, route, body in requests:
            answers = []
            for session in (mine, SESSION):
                content = None if body is None else {"session_id": session, **body}
                reply = await door.clients["b"].request(method, route.format(session), json=content)
                assert (reply.status_code, error_code(reply)) == (404, "session_not_found")
                answers.append((reply.text.replace(session, "ID"), sorted(reply.headers)))
            assert answers[0] == answers[1]
        assert (await door.clients["a"].get(f"/v1/session/{mine}/graph")).json()["session_id"] == mine
        # Nor does an id that another tenant has tell by being taken.
        body = {"session_id": mine, "create_session": True, "calls": [call_body()]}
        taken = await door.clients["b"].post("/v1/submit", json=body)
        assert (taken.status_code, taken.json()["session_id"]) == (200, mine)
        assert (await door.clients["b"].delete(f"/v1/session/{mine}")).status_code == 204
        assert (await door.post("a", "/v1/get", session_id=mine, **one)).json()["value"] == "ok"

    run(tiny_model, path, scenario)


def test_a_tenant_sees_its_own_calls_and_the_operator_all(tiny_model: Path, path: Path) -> None:
    async def scenario(door: Door) -> None:
        await door.manager.add_engine()
        for who in ("a", "b"):
            session = await door.session(who)
            await door.post(who, "/v1/submit", session_id=session, calls=[call_body(function=who)])
            await door.post(who, "/v1/get", session_id=session, semantic_var_id="y")
        seen = {}
        for who in ("a", "b", "operator"):
            calls = (await door.clients[who].get("/v1/calls")).json()["calls"]
            seen[who] = [call["function"] for call in calls]
            assert all(call["session_id"].startswith("s-") for call in calls)
        assert seen == {"a": ["a"], "b": ["b"], "operator": ["a", "b"]}

    run(tiny_model, path, scenario)


def test_why_the_service_is_not_ready_is_for_the_operator(tiny_model: Path, path: Path) -> None:
    async def scenario(door: Door) -> None:
        texts = {who: (await client.get("/ready")).text for who, client in door.clients.items()}
        assert "no engine has joined at tcp://" in texts.pop("operator")
        assert all("tcp://" not in text and "its log says why" in text for text in texts.values())
        assert (await door.clients["nobody"].get("/ready")).status_code == 503

    run(tiny_model, path, scenario)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
def test_an_unprotected_service_starts_on_the_loopback_only(host: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parrot key new TENANT.*--api-keys FILE.*127\.0\.0\.1"):
        ManagerConfig(host=host)
    assert ManagerConfig(host=host, api_keys=path).host == host
    assert ManagerConfig(host=host, unprotected=True).host == host
    with pytest.raises(ConfigError, match="engine_host"):
        ManagerConfig(engine_host=host, api_keys=path, unprotected=True)
    assert ManagerConfig(host="::1").api_keys is None


def test_metrics_name_tenants_up_to_a_bound(
    tiny_model: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parrot.manager.tenant_metrics.MAX_TENANTS", 1)

    async def scenario(door: Door) -> None:
        for who in ("b", "a", "a"):
            await door.session(who)
        text = (await door.clients["operator"].get("/metrics")).text
        assert 'parrot_tenant_requests_total{tenant="b"} 1.0\n' in text
        assert 'parrot_tenant_requests_total{tenant="(others)"} 2.0\n' in text
        assert 'tenant="a"' not in text

    run(tiny_model, path, scenario)


def test_a_manager_without_its_keys_does_not_serve(tiny_model: Path, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api_keys = .*No such file"):
        run_manager(ManagerConfig(model="never loaded", api_keys=path))
    path.write_text("{}")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod 600"):
        run_manager(ManagerConfig(model="never loaded", api_keys=path))
    path.chmod(0o600)

    async def main() -> None:
        async with running_manager(tiny_model, api_keys=path) as manager:
            service = Service(Executor(manager.executor.config, manager.tokenizer, manager.registry))
            with pytest.raises(InternalError, match="not given the keys"):
                create_app(service, manager.registry)

    asyncio.run(main())
