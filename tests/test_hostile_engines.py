"""Engines that say what no engine would: the manager and its other engines go on."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from manager_harness import CHAIN, Manager, ScriptedEngine, last_word, run, until, zero_stats
from parrot import wire
from parrot.manager.readiness import unready_reason

INT64, UINT64 = 2**63 - 1, 2**64 - 1
WRONG_REGISTRATIONS: list[dict[str, Any]] = [
    *({"base_us": value} for value in (math.nan, math.inf, -1.0, 1e300)),
    *({"per_kv_token_us": value} for value in (math.nan, -math.inf)),
    *({"capacity_tokens": value} for value in (0, -5, INT64, UINT64)),
    *({"num_blocks": value} for value in (0, -1, UINT64)),
    *({"max_batch_size": value} for value in (0, -1, 2**31, UINT64)),
    *({"max_model_len": value} for value in (0, -1, UINT64)),
    {"pid": -1},
    {"sequence": UINT64},
    {"name": ""},
    {"name": "x" * 100_000},
    {"name": ""},
    {"name": "engine\n2026-01-01 ERROR a line of its own"},
]


def registration(manager: Manager, epoch: str, name: str = "hostile", **wrong: Any) -> wire.Register:
    model = wire.ModelInfo(
        "tiny", manager.tokenizer.fingerprint, manager.tokenizer.vocab_size, 1024, "float32", "cpu"
    )
    cost = wire.CostModel(1000.0, 10.0, 10.0, 0.01, 4096, 256)
    message = wire.Register(wire.PROTOCOL_VERSION, name, epoch, 1, model, cost, 64)
    for field, value in wrong.items():
        if hasattr(cost, field):
            message = msgspec.structs.replace(
                message, cost_model=msgspec.structs.replace(cost, **{field: value})
            )
        elif field == "max_model_len":
            message = msgspec.structs.replace(message, model=msgspec.structs.replace(model, **{field: value}))
        else:
            message = msgspec.structs.replace(message, **{field: value})
    return message


class Stranger:
    """A plain DEALER that never answers."""

    def __init__(self, manager: Manager) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(manager.registry.address)

    async def send(self, message: wire.FromEngine) -> None:
        await self.socket.send(wire.encode(message))

    def close(self) -> None:
        self._context.destroy(linger=0)


async def still_pings(engine: ScriptedEngine) -> None:
    num_pings = len(engine.pings)
    await until(lambda: len(engine.pings) > num_pings + 12)  # longer than an engine may be silent


def test_a_wrong_registration_is_dropped_and_the_heartbeats_go_on(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        stranger = Stranger(manager)
        try:
            for number, wrong in enumerate(WRONG_REGISTRATIONS):
                await stranger.send(registration(manager, f"e{number}", **wrong))
                await until(lambda expected=number + 1: manager.registry.num_dropped_frames == expected)
            assert [one.name for one in manager.registry.engines] == ["engine-0"]
            await still_pings(engine)
        finally:
            stranger.close()
        assert not manager.registry.background.failures
        assert await manager.get(manager.submit(*CHAIN), "c") == "hello!!!"

    run(tiny_model, scenario)


def test_an_engine_that_the_scheduler_refuses_leaves_no_trace(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        taken = manager.executor.scheduler.add_engine

        def refuse(_: object) -> None:
            raise ValueError("not this one")

        monkeypatch.setattr(manager.executor.scheduler, "add_engine", refuse)
        stranger = Stranger(manager)
        try:
            await stranger.send(registration(manager, "e1", name="engine-0"))
            frame = await asyncio.wait_for(stranger.socket.recv(), 60)
            assert isinstance(wire.decode_to_engine(frame), wire.Shutdown)
            assert manager.registry.engines == manager.registry.alive == [manager.registry.get(1)]
            await still_pings(engine)
            monkeypatch.setattr(manager.executor.scheduler, "add_engine", taken)
        finally:
            stranger.close()
        assert await manager.get(manager.submit(*CHAIN), "c") == "hello!!!"

    run(tiny_model, scenario)


@pytest.mark.parametrize("value", [-1, INT64, UINT64])
def test_hostile_statistics_are_dropped(tiny_model: Path, value: int) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        for field in wire.EngineStats.__struct_fields__:
            stats = msgspec.structs.replace(zero_stats(), **{field: value})
            await engine.send_message(wire.Heartbeat(engine.epoch, stats))
        await engine.send_message(wire.Heartbeat(engine.epoch, zero_stats(), sequence=value))
        for field in wire.StepCost.__struct_fields__:
            cost = msgspec.structs.replace(
                wire.StepCost(1, 1, 1, 1), **{field: -1.0 if value < 0 else float("nan")}
            )
            await engine.send_message(wire.Heartbeat(engine.epoch, zero_stats(), cost=cost))
        num_fields = len(wire.EngineStats.__struct_fields__) + 1 + len(wire.StepCost.__struct_fields__)
        await until(lambda: manager.registry.num_dropped_frames == num_fields)
        await still_pings(engine)
        assert not manager.registry.background.failures

    run(tiny_model, scenario)


def test_an_exception_in_a_heartbeat_is_counted_and_the_next_ones_follow(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)

        def fail() -> None:
            raise RuntimeError("the watchdog has a bug")

        monkeypatch.setattr(manager.executor.watchdog, "look", fail)
        await still_pings(engine)
        assert manager.registry.background.failures["engine-heartbeat"] > 5
        assert unready_reason(manager.service, manager.registry) is None

    run(tiny_model, scenario)
    assert "the watchdog has a bug" in caplog.text


def test_a_loop_that_ends_all_the_same_makes_the_service_unready(tiny_model: Path) -> None:
    class End(BaseException):
        pass

    async def scenario(manager: Manager) -> None:
        await manager.add_engine(last_word)

        async def turn() -> None:
            raise End("for good")

        manager.registry.background.start("test", turn)
        await until(lambda: unready_reason(manager.service, manager.registry) is not None)
        assert "the loop test has ended: End" in (unready_reason(manager.service, manager.registry) or "")

    run(tiny_model, scenario)


@pytest.mark.parametrize("per_token_us", [0.0, 5e-324, 1e-300, 1e9])
def test_what_a_cache_allows_is_bounded_whatever_a_step_is_said_to_take(per_token_us: float) -> None:
    cost = wire.CostModel(0.0, 0.0, 0.0, per_token_us, 4096, 256)
    assert cost.tokens_within(20e3, 1024) == (0 if per_token_us == 1e9 else 4096)
