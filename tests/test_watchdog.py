"""Engines that are there and do not get on, and a queue that does not: noticed, told, and got round."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from graph_builder import prompt_call
from manager_harness import Manager, ScriptedEngine, running_manager, serving, until, zero_stats
from parrot import api, errors, wire
from parrot.manager.clock import now_us
from parrot.manager.health import Slowdown

Scenario = Callable[[Manager], Awaitable[None]]
CALL = prompt_call("only", "Say hello {{output:a}}")


def run(model: Path, scenario: Scenario, **config: object) -> None:
    async def main() -> None:
        async with running_manager(model, **config) as manager:
            await scenario(manager)

    asyncio.run(main())


async def readiness(url: str) -> tuple[int, str]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        reply = await client.get("/ready")
        body = reply.json()
        return reply.status_code, body["error"]["message"] if "error" in body else str(body["stalled"])


def test_an_engine_that_beats_and_makes_no_step_loses_its_calls_to_another_until_it_turns_again(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(manager: Manager) -> None:
        hung = await manager.add_engine(held=True)
        hung.stats = stuck()
        async with serving(manager) as url:
            session = manager.submit(CALL)
            await until(lambda: len(hung.dispatches) == 1)
            assert (await readiness(url))[0] == 200
            manager.pass_without_progress(1.1)
            await until(lambda: manager.registry.alive == [])
            status, reason = await readiness(url)
            assert status == 503
            assert "engine-0 has 1 calls and made no step" in reason
            num_pings = len(hung.pings)
            for _ in range(4):
                await hung.beat()
                await asyncio.sleep(0.02)
            assert len(hung.pings) == num_pings, "it still hangs: it is not invited"
            await manager.add_engine(name="engine-1")
            assert await manager.get(session, "a") == "ok"
            await until(lambda: manager.executor.watchdog.problem is None)
            assert (await readiness(url))[0] == 200
            assert "engine-0" in (await readiness(url))[1]
            hung.stats = msgspec.structs.replace(hung.stats, decode_tokens=1)  # a step has ended after all
            hung.held = False
            await rejoin(manager, hung)
            assert manager.registry.stalled == []
            assert await manager.get(manager.submit(CALL), "a") == "ok"
        dumps = [record.message for record in caplog.records if "made no step" in record.message]
        assert sum("Say hello" in dump or "only" in dump for dump in dumps) == 1

    with caplog.at_level(logging.ERROR):
        run(tiny_model, scenario)


async def beats(engine: ScriptedEngine) -> None:
    """The manager has looked at its engines since, and has pinged this one."""
    num_pings = len(engine.pings)
    await until(lambda: len(engine.pings) > num_pings + 1)


def stuck() -> wire.EngineStats:
    """An engine whose loop has not come to an end of its turn."""
    return msgspec.structs.replace(zero_stats(), turn_us=5_000_000, num_running=1)


async def rejoin(manager: Manager, engine: ScriptedEngine) -> None:
    """What an engine does that hears of a manager id that it does not know."""
    known = {message.manager_id for message in engine.pings}
    await engine.beat()
    await until(lambda: any(message.manager_id not in known for message in engine.pings))
    await engine.register()
    await until(lambda: any(one.registration.epoch == engine.epoch for one in manager.registry.alive))


def test_steps_that_compute_are_progress_however_long_a_call_takes(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(CALL)
        await until(lambda: len(engine.dispatches) == 1)
        for token in range(1, 6):
            engine.stats = msgspec.structs.replace(stuck(), decode_tokens=token)
            await until(lambda token=token: manager.registry.alive[0].stats.decode_tokens == token)
            manager.pass_without_progress(0.8)
            await beats(engine)
        assert manager.registry.usable
        await engine.answer(engine.dispatches[0])
        assert await manager.get(session, "a") == "ok"
        manager.pass_without_progress(2.0)
        await beats(engine)
        assert manager.registry.usable, "an idle engine makes no step either"

    run(tiny_model, scenario)


def steps_made(num_steps: int) -> wire.EngineStats:
    return msgspec.structs.replace(zero_stats(), num_steps=num_steps, decode_tokens=num_steps)


async def go_on_without(manager: Manager, engine: ScriptedEngine, turn: int) -> None:
    """The engine makes many steps over a long time, and what it has does not end."""
    engine.stats = steps_made(turn * 1_000_000)
    await until(lambda: any(one.stats == engine.stats for one in manager.registry.alive))
    for one in manager.executor.dispatcher.runs:
        one.sent_us -= round(2e6 * manager.config.stall_after_s)
    manager.executor.watchdog._look_at_runs_after = 0.0


def test_a_call_that_an_engine_loses_while_it_goes_on_with_others_runs_elsewhere(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(manager: Manager) -> None:
        forgetful = await manager.add_engine(held=True)
        session = manager.submit(CALL)
        await until(lambda: len(forgetful.dispatches) == 1)
        other = await manager.add_engine(name="engine-1")
        await go_on_without(manager, forgetful, 1)
        assert await manager.get(session, "a", timeout_ms=None) == "ok"
        lost = forgetful.dispatches[0].call_id
        await until(lambda: any(isinstance(m, wire.Abort) and lost in m.call_ids for m in forgetful.other))
        assert len(other.dispatches) == 1
        assert [engine.name for engine in manager.registry.usable] == ["engine-0", "engine-1"]
        assert manager.executor.watchdog.num_overdue == 1
        manager.check_at_rest()

    run(tiny_model, scenario)
    assert sum("did not end in" in record.message for record in caplog.records) == 1


def test_a_call_that_is_lost_again_and_again_ends_with_each_loss_as_a_cause(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(CALL)
        for turn in (1, 2, 3):
            await until(lambda turn=turn: len(engine.dispatches) == turn)  # type: ignore[misc]
            await go_on_without(manager, engine, turn)
        with pytest.raises(errors.EngineLost, match="lost with engine engine-0") as caught:
            await manager.get(session, "a", timeout_ms=None)
        assert len(engine.dispatches) == 3
        assert ["did not end in" in cause.message for cause in caught.value.causes] == [True] * 3
        manager.check_at_rest()

    run(tiny_model, scenario)


@pytest.mark.parametrize(("num_steps", "is_late"), [(2_000_000, False), (5, True)])
def test_a_call_is_not_overdue_before_its_time_nor_on_an_engine_that_makes_few_steps(
    tiny_model: Path, num_steps: int, is_late: bool
) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(CALL)
        await until(lambda: len(engine.dispatches) == 1)
        engine.stats = steps_made(num_steps)
        await until(lambda: manager.registry.alive[0].stats == engine.stats)
        (sent,) = manager.executor.dispatcher.runs
        after_us = 0 if is_late else 3_600_000_000
        assert sent.overdue(now_us(), after_us) is None
        await engine.answer(engine.dispatches[0])
        assert await manager.get(session, "a") == "ok"

    run(tiny_model, scenario, stall_after_s=3600.0)


def test_calls_that_wait_although_an_engine_is_idle_make_the_service_unready_until_they_go(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(manager: Manager) -> None:
        await manager.add_engine()
        bridge = manager.executor.scheduler
        schedule = bridge.schedule
        bridge.schedule = list  # type: ignore[method-assign]
        session = manager.submit(CALL)
        async with serving(manager) as url:
            watchdog = manager.executor.watchdog
            await until(lambda: watchdog._idle_since is not None)
            assert watchdog.problem is None
            watchdog._idle_since -= 1.1 * manager.config.stall_after_s  # type: ignore[operator]
            await until(lambda: watchdog.problem is not None)
            status, reason = await readiness(url)
            assert status == 503
            assert "1 calls wait" in reason
            bridge.schedule = schedule  # type: ignore[method-assign]
            assert await manager.get(session, "a") == "ok"  # the watchdog tries again itself
            await until(lambda: manager.executor.watchdog.problem is None)
            assert (await readiness(url))[0] == 200

    run(tiny_model, scenario)
    assert sum("although an engine has nothing to do" in record.message for record in caplog.records) == 1


def test_a_silent_engine_gets_no_more_calls_before_it_is_lost_and_gets_them_when_it_is_heard(
    tiny_model: Path,
) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine()
        engine.is_mute = True
        await until(lambda: manager.registry.alive[0].state == "silent")
        session = manager.submit(CALL)
        assert await manager.get(session, "a", timeout_ms=100) is None
        assert engine.dispatches == []
        engine.is_mute = False
        assert await manager.get(session, "a") == "ok"
        await until(lambda: manager.registry.alive[0].state == "ready")

    run(tiny_model, scenario, silent_beats=2.5)


def test_a_draining_engine_finishes_what_it_has_and_gets_nothing_new(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        first = manager.submit(CALL)
        await until(lambda: len(engine.dispatches) == 1)
        await engine.send_message(wire.Draining(engine.epoch, "SIGTERM"))
        await until(lambda: not manager.registry.usable)
        async with serving(manager) as url:
            assert (await readiness(url)) == (503, "every engine is draining: engine-0")
        second = manager.submit(CALL)
        await engine.answer(engine.dispatches[0])
        assert await manager.get(first, "a") == "ok"
        assert len(engine.dispatches) == 1
        await engine.die()
        await manager.add_engine(name="engine-1")
        assert await manager.get(second, "a") == "ok"

    run(tiny_model, scenario)


def test_the_error_of_a_call_that_used_up_its_retries_names_each_loss(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        session = manager.submit(CALL)
        for attempt in range(3):
            engine = await manager.add_engine(name=f"engine-{attempt}", held=True)
            await until(lambda engine=engine: len(engine.dispatches) == 1)
            await engine.die()
        with pytest.raises(errors.EngineLost) as caught:
            await manager.get(session, "a")
        assert [cause.message.split(":")[0] for cause in caught.value.causes] == [
            "engine engine-2",
            "engine engine-1",
            "engine engine-0",
        ]

    run(tiny_model, scenario)


def test_a_clients_own_mistakes_never_count_against_an_engine(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        refusal = errors.InvalidRequest("no such grammar", param="schema").to_info()
        for number in range(50):
            session = manager.submit(CALL)
            await until(lambda number=number: len(engine.dispatches) == number + 1)
            await engine.send(wire.CallFailed(engine.dispatches[-1].call_id, refusal))
            with pytest.raises(errors.InvalidRequest):
                await manager.get(session, "a")
        async with serving(manager) as url:
            async with httpx.AsyncClient(base_url=url, timeout=120) as client:
                for _ in range(20):
                    assert (await client.post("/v1/submit", json={"calls": 3})).status_code == 400
            assert (await readiness(url)) == (200, "[]")
        view = manager.registry.views()[0]
        assert (view.state, view.slowdown, manager.executor.dispatcher.num_retries) == ("ready", 1.0, 0)
        engine.held = False
        assert await manager.get(manager.submit(CALL), "a") == "ok"

    run(tiny_model, scenario)


def test_a_slow_engine_is_told_to_the_scheduler_and_forgiven_when_it_idles() -> None:
    meter, told = Slowdown(), []
    stats = zero_stats()
    for step in range(1, 20):
        stats = msgspec.structs.replace(
            stats, num_steps=step, busy_us=stats.busy_us + 600_000, expected_us=stats.expected_us + 60_000
        )
        told.append(meter.observe(stats))
    assert 9 < meter.factor <= 10
    news = [factor for factor in told if factor is not None]
    assert len(news) <= 6
    assert 8 < news[-1] <= 10
    for _ in range(100):
        told.append(meter.observe(stats))
    assert told[-100:].count(1.0) == 1
    assert meter.factor < 1.05


def test_an_engine_that_is_faster_than_it_said_changes_nothing() -> None:
    meter = Slowdown()
    stats = zero_stats()
    for step in range(1, 20):
        stats = msgspec.structs.replace(
            stats, num_steps=step, busy_us=stats.busy_us + 10_000, expected_us=stats.expected_us + 60_000
        )
        assert meter.observe(stats) is None
    assert meter.factor == 1.0


def test_an_engine_that_was_repriced_is_as_it_says_and_idle_is_held_to_be_as_at_its_start() -> None:
    meter = Slowdown()
    stats = msgspec.structs.replace(zero_stats(), num_steps=1, busy_us=900_000, expected_us=100_000)
    assert meter.observe(stats) is not None
    assert meter.factor > 2
    meter.repriced(0.1, stats)  # ten times what it was
    assert meter.factor == 1.0
    told = [meter.observe(stats) for _ in range(100)]
    assert 0.1 <= meter.factor < 0.12
    news = [factor for factor in told if factor is not None]
    assert news == sorted(news, reverse=True)
    assert 0.1 <= news[-1] < 0.13
    for step in range(2, 12):  # it computes again, and as it said
        stats = msgspec.structs.replace(
            stats, num_steps=step, busy_us=stats.busy_us + 60_000, expected_us=stats.expected_us + 60_000
        )
        told.append(meter.observe(stats))
    assert meter.factor > 0.99
    assert [factor for factor in told if factor is not None][-1] == 1.0


def test_new_calls_go_by_what_steps_have_come_to_take(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        slow = await manager.add_engine(held=True)
        fast = await manager.add_engine(name="engine-1", held=True)
        slow.cost = wire.StepCost(40_000.0, 400.0, 400.0, 0.4)
        await until(lambda: manager.registry.views()[0].num_cost_changes == 1)
        for _ in range(4):
            manager.submit(CALL)
        await until(lambda: len(fast.dispatches) + len(slow.dispatches) == 4)
        assert len(fast.dispatches) == 4

    run(tiny_model, scenario)


def test_deadlines_are_near_by_what_steps_have_come_to_take(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        label = api.LabelBody(semantic_var_id="a", criteria="DEADLINE", target_ms=3_600_000.0)
        objectives = []
        for num_changes in (0, 1):
            await until(lambda n=num_changes: manager.registry.views()[0].num_cost_changes == n)  # type: ignore[misc]
            session = manager.submit(CALL, labels=[label])
            objectives.append(manager.service.graph(session).calls[0].objective)
            engine.cost = wire.StepCost(5e8, 0.0, 0.0, 0.0)
        assert objectives == ["THROUGHPUT", "LATENCY"]

    run(tiny_model, scenario)


def test_new_calls_avoid_an_engine_whose_steps_have_become_slow(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        slow = await manager.add_engine(held=True)
        fast = await manager.add_engine(name="engine-1", held=True)
        slow.stats = msgspec.structs.replace(
            zero_stats(), num_steps=9, busy_us=9_000_000, expected_us=100_000
        )
        await until(lambda: manager.registry.views()[0].slowdown > 20)
        for _ in range(4):
            manager.submit(CALL)
        await until(lambda: len(fast.dispatches) + len(slow.dispatches) == 4)
        assert len(fast.dispatches) == 4

    run(tiny_model, scenario)
