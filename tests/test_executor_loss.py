"""Calls without an engine: before the first one is there, and when theirs is lost or silent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from graph_builder import prompt_call, read
from manager_harness import CHAIN, Manager, last_word, run, until
from parrot import errors


def test_calls_wait_for_the_first_engine(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        session = manager.submit(*CHAIN)
        assert await manager.get(session, "a", timeout_ms=20) is None
        await manager.add_engine(last_word)
        assert await manager.get(session, "c") == "hello!!!"

    run(tiny_model, scenario)


def test_calls_that_wait_for_an_engine_that_does_not_start_end_with_its_words(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        session = manager.submit(*CHAIN)
        waiting = asyncio.create_task(manager.get(session, "a"))
        await asyncio.sleep(0.01)
        manager.executor.engines_do_not_start("engine-0 does not come up: no such device")
        with pytest.raises(errors.Unavailable, match="no such device"):
            await waiting
        with pytest.raises(errors.UpstreamFailed):
            await manager.get(session, "c")
        with pytest.raises(errors.Unavailable, match="no such device"):
            manager.submit(*CHAIN)
        manager.check_at_rest()
        await manager.add_engine(last_word)
        assert await manager.get(manager.submit(*CHAIN), "c") == "hello!!!"

    run(tiny_model, scenario)


def test_one_living_engine_is_enough(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(*CHAIN)
        await until(lambda: len(engine.dispatches) == 1)
        manager.executor.engines_do_not_start("engine-1 does not come up")
        engine.held, engine.reply = False, last_word
        await engine.answer(engine.dispatches[0])
        assert await manager.get(session, "c") == "hello!!!"
        assert await manager.get(manager.submit(*CHAIN), "c") == "hello!!!"

    run(tiny_model, scenario)


def test_calls_that_wait_for_a_silent_engine_go_there_once_it_is_heard_again(tiny_model: Path) -> None:
    """At once: nothing else happens that would place them."""

    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        engine.is_mute = True
        await until(lambda: manager.registry.usable == [])
        session = manager.submit(CHAIN[0])
        assert await manager.get(session, "a", timeout_ms=100) is None
        assert manager.executor.dispatcher.num_queued == 1
        engine.is_mute = False
        assert await manager.get(session, "a", timeout_ms=10_000) == "hello!"

    run(tiny_model, scenario, silent_beats=5, stall_after_s=600.0)


def test_calls_of_a_lost_engine_run_again_elsewhere(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        first = await manager.add_engine(held=True)
        session = manager.submit(*CHAIN)
        await until(lambda: len(first.dispatches) == 1)
        await first.die()
        second = await manager.add_engine(last_word, name="engine-1")
        assert await manager.get(session, "c") == "hello!!!"
        call = manager.service.graph(session).calls[0]
        assert (call.attempts, call.engine, len(second.dispatches)) == (2, "engine-1", 3)
        assert second.dispatches[0].call_id != first.dispatches[0].call_id

    run(tiny_model, scenario)


def test_an_output_that_was_replied_before_the_loss_stays_as_generated(tiny_model: Path) -> None:
    two = prompt_call("two", "One {{input:x}} {{output:a}} two {{output:b}}", read("x", value="v"))

    async def scenario(manager: Manager) -> None:
        first = await manager.add_engine(lambda _: "from-first")
        first.held = True
        session = manager.submit(two)
        await until(lambda: len(first.dispatches) == 1)
        await first.answer(first.dispatches[0], num_outputs=1)
        assert await manager.get(session, "a") == "from-first"
        await first.die()
        second = await manager.add_engine(lambda _: "from-second", name="engine-1")
        assert await manager.get(session, "b") == "from-second"
        assert second.prompts == ["One v from-first two "]

    run(tiny_model, scenario)


def test_a_call_that_used_up_its_retries_ends_as_engine_lost(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        session = manager.submit(*CHAIN)
        for attempt in range(2):
            engine = await manager.add_engine(name=f"engine-{attempt}", held=True)
            await until(lambda engine=engine: len(engine.dispatches) == 1)
            await engine.die()
        with pytest.raises(errors.EngineLost):
            await manager.get(session, "a")
        with pytest.raises(errors.UpstreamFailed) as caught:
            await manager.get(session, "c")
        assert caught.value.causes

    run(tiny_model, scenario, max_retries=1)


def test_a_silent_engine_is_given_up(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        silent = await manager.add_engine(held=True)
        session = manager.submit(*CHAIN)
        await until(lambda: len(silent.dispatches) == 1)
        silent.close()
        await manager.time_out()
        await manager.add_engine(last_word, name="engine-1")
        assert await manager.get(session, "c") == "hello!!!"

    run(tiny_model, scenario)
