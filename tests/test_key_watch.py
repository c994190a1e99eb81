"""A file of keys that changes under a running manager."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from pathlib import Path

import pytest

from auth_harness import Door, call_body, run
from manager_harness import until
from parrot.manager import key_watch
from parrot.manager.key_file import read_key_file
from parrot.manager.key_store import add_tenant_key, revoke_key, set_limits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_changed_file_holds_without_a_restart(
    tiny_model: Path, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_watch, "_EVERY_S", 0.01)

    async def status(door: Door, key: str) -> int:
        reply = await door.clients["nobody"].get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        return reply.status_code

    async def becomes(door: Door, key: str, expected: int) -> None:
        for _ in range(500):
            if await status(door, key) == expected:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still {await status(door, key)}")

    async def scenario(door: Door) -> None:
        engine = await door.manager.add_engine()
        engine.held = True
        body = {"model": door.model, "prompt": "x", "max_tokens": 4, "stream": True}
        async with door.clients["a"].stream("POST", "/v1/completions", json=body) as stream:
            await until(lambda: len(engine.dispatches) == 1)
            rotated = add_tenant_key(path, "a", {})
            await becomes(door, rotated, 200)
            revoke_key(path, read_key_file(path).keys[0].key_id)
            await becomes(door, door.keys["a"], 401)
            await engine.answer(engine.dispatches[0])
            assert "ok" in "".join([piece async for piece in stream.aiter_text()])

        session = await door.session("b")
        set_limits(path, "b", {"max_concurrent_calls": 1})
        await until(lambda: door.manager.service.tenants.get("b").limits.max_concurrent_calls == 1)
        reply = await door.post("b", "/v1/submit", session_id=session, calls=[call_body(), call_body()])
        assert reply.status_code == 413

        before = path.read_text()
        watch = door.manager.service.key_watch
        assert watch is not None
        for broken in ("{", '{"tenants": {"b": {"weight": -1}}}'):
            num_failures = watch.num_failures
            path.write_text(broken)
            await until(lambda seen=num_failures: watch.num_failures > seen)  # type: ignore[misc]
            assert await status(door, rotated) == 200
        assert "tenants.b.weight: " in caplog.text
        path.unlink()
        await until(lambda: watch.num_failures == 3)
        assert await status(door, rotated) == 200
        path.write_text(json.dumps({**json.loads(before), "keys": []}))
        await becomes(door, rotated, 401)
        assert rotated not in caplog.text

    run(tiny_model, path, scenario)


def test_a_file_can_be_read_again_at_once(
    tiny_model: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_watch, "_state_of", lambda _: None)  # as if nothing ever changed
    monkeypatch.setattr(key_watch, "_EVERY_S", 60.0)

    async def scenario(door: Door) -> None:
        await asyncio.sleep(0.05)
        set_limits(path, "a", {"weight": 7.0})
        assert door.manager.service.key_watch is not None
        door.manager.service.key_watch.read_now()
        await door.session("a")
        await until(lambda: door.manager.service.tenants.get("a").limits.weight == 7.0)

    run(tiny_model, path, scenario)


def test_a_pipe_in_place_of_the_file_is_a_failure_like_others(
    tiny_model: Path, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_watch, "_EVERY_S", 0.01)

    async def scenario(door: Door) -> None:
        watch = door.manager.service.key_watch
        assert watch is not None
        before = path.read_text()
        caplog.set_level(logging.INFO)
        path.unlink()
        os.mkfifo(path, 0o600)
        await until(lambda: "it is not a regular file" in caplog.text)
        assert watch.num_failures >= 1
        path.unlink()
        path.write_text(json.dumps({**json.loads(before), "keys": []}))
        path.chmod(0o600)
        await until(lambda: "0 API keys of" in caplog.text)

    run(tiny_model, path, scenario)


def test_a_look_that_hangs_is_said_once_and_holds_up_nobody(
    tiny_model: Path, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_watch, "_EVERY_S", 0.01)
    monkeypatch.setattr(key_watch, "_HANGS_AFTER_S", 0.02)
    goes_on = threading.Event()
    looks: list[Path] = []
    look = key_watch._state_of

    def hanging(path: Path) -> object:
        looks.append(path)
        goes_on.wait(20)
        return look(path)

    monkeypatch.setattr(key_watch, "_state_of", hanging)

    async def scenario(door: Door) -> None:
        watch = door.manager.service.key_watch
        assert watch is not None
        await until(lambda: "it cannot be looked at" in caplog.text)
        await door.session("a")
        await asyncio.sleep(0.05)
        assert watch.num_failures == len(looks) == caplog.text.count("it cannot be looked at") == 1
        goes_on.set()
        await until(lambda: len(looks) > 2)

    run(tiny_model, path, scenario)
