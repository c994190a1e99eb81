"""Frames between manager and engines that never come: calls run again, and not without end."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest

from graph_builder import prompt_call
from manager_harness import Manager, ScriptedEngine, run, serving, until, zero_stats
from parrot import errors, wire
from parrot.manager import engines
from parrot.manager.call import MAX_FREE_RESTARTS
from parrot.manager.frames import MAX_LOSSES

CALL = prompt_call("only", "Say hello {{output:a}}")


def steps_made(num_steps: int) -> wire.EngineStats:
    return msgspec.structs.replace(zero_stats(), num_steps=num_steps, decode_tokens=num_steps)


@pytest.mark.parametrize("direction", ["dispatch", "reply", "last reply"])
def test_calls_whose_messages_were_lost_run_again_without_a_new_engine(
    tiny_model: Path, direction: str
) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(CALL)
        await until(lambda: len(engine.dispatches) == 1)
        lost = engine.dispatches.pop()
        engine.held = False
        if direction == "dispatch":
            engine.num_missing = 1
        elif direction == "reply":
            await engine.send_message(wire.StepReplies(engine.epoch, (), zero_stats(), sequence=2))
        else:
            engine.sequence = 1  # announced by the next heartbeat
        assert await manager.get(session, "a") == "ok"
        assert engine.dispatches[0].call_id != lost.call_id
        assert any(
            isinstance(message, wire.Abort) and lost.call_id in message.call_ids for message in engine.other
        )
        assert manager.service.graph(session).calls[0].attempts == 2
        assert manager.registry.num_lost_frames == 1
        await until(lambda: manager.executor.dispatcher.num_busy == 0)
        manager.check_at_rest()

    run(tiny_model, scenario, max_retries=0)


def test_a_reply_that_was_lost_is_asked_for_again_and_its_call_does_not_run_again(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(CALL)
        await until(lambda: len(engine.dispatches) == 1)
        lost = wire.StepReplies(engine.epoch, engine._replies(engine.dispatches[0]), zero_stats(), sequence=1)
        later = wire.StepReplies(engine.epoch, (), zero_stats(), sequence=2)
        engine.is_mute = True  # a heartbeat more or less decides nothing here
        await engine.send_message(later)
        await until(lambda: wire.Resend(1) in engine.other)
        await engine.send_message(lost)
        await engine.send_message(later)
        assert await manager.get(session, "a") == "ok"
        assert manager.service.graph(session).calls[0].attempts == 1
        assert (manager.registry.num_resends, manager.registry.num_lost_frames) == (1, 0)
        await until(lambda: manager.executor.dispatcher.num_busy == 0)
        manager.check_at_rest()

    run(tiny_model, scenario, lost_after_s=600.0)


@pytest.mark.parametrize("number", ["sequence", "num_missing"])
def test_an_engine_that_only_loses_frames_is_lost_although_its_counters_grow(
    tiny_model: Path, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(CALL)
        await until(lambda: len(engine.dispatches) == 1)

        def is_lost() -> bool:
            setattr(engine, number, getattr(engine, number) + 3)
            engine.stats = steps_made(getattr(engine, number))
            return manager.registry.alive == []

        await until(is_lost)
        with pytest.raises(errors.EngineLost, match="lost with engine") as caught:
            await manager.get(session, "a")
        assert "frames were lost 4 times and none came in order" in caught.value.causes[0].message
        assert len(engine.dispatches) <= 4
        assert (manager.registry.num_lost_frames, manager.registry.num_cut_off) == (4, 1)
        async with serving(manager) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
            assert "parrot_engines_cut_off_total 1" in (await client.get("/metrics")).text

    monkeypatch.setattr(engines, "MAX_LOSSES", 4)
    run(tiny_model, scenario, max_retries=0)


async def lose_a_frame(manager: Manager, engine: ScriptedEngine) -> None:
    """One of the manager's; the next one of the engine comes, and says nothing."""
    num_lost = manager.registry.num_lost_frames
    engine.num_missing += 1
    await until(lambda: manager.registry.num_lost_frames > num_lost)
    frame = wire.StepReplies(engine.epoch, (), zero_stats(), sequence=engine.sequence + 1)
    await engine.send_message(frame)
    await until(lambda: manager.registry.alive[0].frames.newest == frame.sequence)
    engine.sequence = frame.sequence


def test_an_engine_that_loses_a_frame_now_and_then_stays_and_a_call_hit_each_time_ends(
    tiny_model: Path,
) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(CALL)
        for turn in range(MAX_FREE_RESTARTS + 1):
            await until(lambda turn=turn: len(engine.dispatches) == turn + 1)  # type: ignore[misc]
            await lose_a_frame(manager, engine)
        with pytest.raises(errors.EngineLost) as caught:
            await manager.get(session, "a")
        assert "its frames were lost" in caught.value.causes[0].message
        for _ in range(MAX_LOSSES):
            await lose_a_frame(manager, engine)
        assert len(engine.dispatches) == MAX_FREE_RESTARTS + 1
        assert manager.registry.usable
        manager.check_at_rest()

    run(tiny_model, scenario, max_retries=0)


def test_a_frame_that_is_sent_again_does_not_bring_back_its_statistics(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine()
        engine.stats = steps_made(7)
        await until(lambda: manager.registry.alive[0].stats == engine.stats)
        engine.is_mute = True
        await engine.send_message(wire.StepReplies(engine.epoch, (), steps_made(3), sequence=1))
        await until(lambda: manager.registry.alive[0].frames.newest == 1)
        assert manager.registry.alive[0].stats == engine.stats

    run(tiny_model, scenario)
