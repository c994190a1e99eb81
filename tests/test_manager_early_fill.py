"""Early fill in the manager: what is filled where, for whom, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from pathlib import Path

import pytest

import simulation
from graph_builder import prompt_call, read, value
from manager_harness import Manager, ScriptedEngine, running_manager, until
from parrot import api, wire
from parrot.config import SchedulerConfig
from parrot.manager.early_fill import EarlyFillCounters
from parrot.simulation.cluster import running_cluster
from parrot.simulation.engine import EngineSpec
from parrot.simulation.loop import SimulatedLoop, run_simulated

ROLE = "You are a reviewer of programs who reads every line with care and says what is wrong with it. "
WAITING = prompt_call("wait", ROLE + "{{input:code}} {{output:review}}")
PRODUCER = prompt_call("write", "Write {{output:code}}")


def run(model: Path, scenario: Callable[[Manager], Awaitable[None]], **config: object) -> None:
    async def main() -> None:
        async with running_manager(model, **config) as manager:
            await scenario(manager)

    asyncio.run(main())


def text_of(engine: ScriptedEngine, fill: wire.Dispatch) -> str:
    return engine._decode(engine._first_ids(fill))


def counters(manager: Manager) -> EarlyFillCounters:
    return manager.executor.early.counters


def freed(engine: ScriptedEngine) -> set[int]:
    frees = [message for message in engine.other if isinstance(message, wire.FreeContexts)]
    return {context_id for message in frees for context_id in message.context_ids}


def aborted(engine: ScriptedEngine) -> set[int]:
    aborts = [message for message in engine.other if isinstance(message, wire.Abort)]
    return {call_id for message in aborts for call_id in message.call_ids}


async def two_engines(manager: Manager) -> tuple[ScriptedEngine, ScriptedEngine]:
    first, second = [await manager.add_engine(name=name) for name in ("engine-0", "engine-1")]
    first.held = True
    return first, second


def test_a_waiting_call_goes_where_its_beginning_was_filled(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        busy, idle = await two_engines(manager)
        session = manager.submit(PRODUCER, WAITING)
        await until(lambda: counters(manager).finished == 1)
        (fill,) = idle.early_fills
        assert ROLE.startswith(text_of(idle, fill))
        assert len(text_of(idle, fill)) > len(ROLE) - 5
        (context,) = {verb.context_id for verb in fill.verbs if isinstance(verb, wire.Fill)}
        assert manager.executor.knowledge.ledger.of_engine(2) == {context: counters(manager).tokens}
        await busy.answer(busy.dispatches[0])
        assert await manager.get(session, "review") == "ok"
        (dispatch,) = idle.dispatches
        first = dispatch.verbs[0]
        assert isinstance(first, wire.Fill)
        assert first.parent_context_id == context
        await until(lambda: context in freed(idle))
        assert manager.executor.scheduler.counters()["placed_prefix"] == 1
        assert counters(manager).cancelled == 0
        manager.check_at_rest()

    run(tiny_model, scenario)


def test_calls_that_begin_alike_share_one_fill_with_the_values_that_exist(tiny_model: Path) -> None:
    prompt = ROLE + "{{input:topic}} in {{input:code}} {{output:OUT}}"
    readers = [
        prompt_call(name, prompt.replace("OUT", name), read("topic")) for name in ("one", "two", "three")
    ]

    async def scenario(manager: Manager) -> None:
        busy, idle = await two_engines(manager)
        session = manager.submit(
            PRODUCER, *readers, variables=[value("topic", "loops and errors").model_dump()]
        )
        await until(lambda: counters(manager).finished == 1)
        assert counters(manager).started == 1
        assert text_of(idle, idle.early_fills[0]).startswith(ROLE + "loops and")
        busy.held = False
        await busy.answer(busy.dispatches[0])
        for name in ("one", "two", "three"):
            assert await manager.get(session, name) == "ok"
        await until(lambda: len(freed(idle)) == 1)
        assert len(idle.dispatches) > 1

    run(tiny_model, scenario)


def test_nothing_is_filled_twice_or_for_little_or_when_switched_off(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        _, idle = await two_engines(manager)
        manager.submit(PRODUCER, WAITING)
        manager.submit(PRODUCER, WAITING)  # the prefix is there, or about to be
        manager.submit(PRODUCER, prompt_call("wait", "Too short {{input:code}} {{output:review}}"))
        manager.submit(PRODUCER, prompt_call("wait", "{{input:code}} " + ROLE + "{{output:review}}"))
        await until(lambda: counters(manager).finished == 1)
        await asyncio.sleep(0.02)
        assert counters(manager).started == len(idle.early_fills) == 1

    async def nothing(manager: Manager) -> None:
        busy, idle = await two_engines(manager)
        session = manager.submit(PRODUCER, WAITING)
        await until(lambda: bool(busy.dispatches))
        busy.held = False
        await busy.answer(busy.dispatches[0])
        assert await manager.get(session, "review") == "ok"
        assert astuple(counters(manager)) == (0, 0, 0, 0, 0)
        assert not busy.early_fills + idle.early_fills

    run(tiny_model, scenario)
    run(tiny_model, nothing, early_fill=False)


def test_at_most_a_quarter_of_a_pool_is_filled_ahead(tiny_model: Path) -> None:
    def waiting(number: int) -> api.CallBody:
        words = " ".join(f"word{number}x{i}" for i in range(9))
        return prompt_call(f"w{number}", f"{words} {{{{input:code}}}} {{{{output:r{number}}}}}")

    async def scenario(manager: Manager) -> None:
        busy = await manager.add_engine(num_tokens=1024)
        busy.held = True
        manager.submit(PRODUCER, *map(waiting, range(10)))
        early = manager.executor.early
        await until(lambda: not early._pending and 0 < early.counters.started == len(busy.early_fills))
        await asyncio.sleep(0.05)  # nothing more comes
        blocks = [-(-len(busy._first_ids(fill)) // 16) for fill in busy.early_fills]
        assert 1 <= len(blocks) < 10
        assert sum(blocks) <= 16 < sum(blocks) + min(blocks)

    run(tiny_model, scenario)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_fill_ends_with_the_calls_that_waited_for_it(tiny_model: Path, is_finished: bool) -> None:
    async def scenario(manager: Manager) -> None:
        busy, idle = await two_engines(manager)
        idle.held = True
        label = api.LabelBody(semantic_var_id="code", criteria="LATENCY")
        session = manager.submit(PRODUCER, WAITING, labels=[label])
        await until(lambda: bool(idle.early_fills))
        (fill,) = idle.early_fills
        if is_finished:
            await idle.answer(fill)
            await until(lambda: counters(manager).finished == 1)
        manager.service.cancel(api.CancelBody(session_id=session, semantic_var_id="review"))
        await until(lambda: bool(freed(idle)))
        assert aborted(idle) == (set() if is_finished else {fill.call_id})
        assert counters(manager).cancelled == int(not is_finished)
        assert len(manager.executor.knowledge.ledger) == 0
        await idle.answer(fill)  # too late
        await busy.answer(busy.dispatches[0])
        assert await manager.get(session, "code") == "ok"
        manager.check_at_rest()

    run(tiny_model, scenario)


def test_a_fill_stops_when_its_call_runs_first(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        busy, idle = await two_engines(manager)
        idle.held = True
        session = manager.submit(PRODUCER, WAITING)
        await until(lambda: bool(idle.early_fills))
        await busy.answer(busy.dispatches[0])
        await until(lambda: bool(idle.dispatches))
        await until(lambda: aborted(idle) == {idle.early_fills[0].call_id})
        await idle.answer(idle.dispatches[0])
        assert await manager.get(session, "review") == "ok"
        assert counters(manager).cancelled == 1
        manager.check_at_rest()

    run(tiny_model, scenario)


def test_what_a_lost_engine_was_to_fill_goes_to_another(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        _, idle = await two_engines(manager)
        idle.held = True
        manager.submit(PRODUCER, WAITING)
        await until(lambda: bool(idle.early_fills))
        third = await manager.add_engine(name="engine-2")
        await idle.die()
        await until(lambda: bool(third.early_fills))

    run(tiny_model, scenario)


def test_an_unfinished_fill_whose_frames_were_lost_is_given_up(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        _, idle = await two_engines(manager)
        idle.held = True
        manager.submit(PRODUCER, WAITING)
        await until(lambda: bool(idle.early_fills))
        idle.num_missing = 1
        await until(lambda: aborted(idle) == {idle.early_fills[0].call_id})
        assert counters(manager).cancelled == 1

    run(tiny_model, scenario)


def test_closing_a_session_releases_its_fills_and_contexts_at_once(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        busy, idle = await two_engines(manager)
        session = manager.submit(PRODUCER, WAITING, prompt_call("done", "Say {{output:said}}"))
        await until(lambda: len(busy.dispatches) + len(idle.dispatches) == 2)
        await until(lambda: counters(manager).started == 1)
        busy.held = False
        for dispatch in busy.early_fills + busy.dispatches:
            await busy.answer(dispatch)
        assert await manager.get(session, "review") == "ok"
        known = manager.executor.knowledge.ledger
        await until(lambda: len(known) == 3)  # those of the three calls
        contexts = {*known.of_engine(1), *known.of_engine(2)}
        manager.service.delete_session(session)
        assert len(known) == 0
        await until(lambda: contexts <= freed(busy) | freed(idle))

    run(tiny_model, scenario)


def test_an_expired_session_leaves_no_context_its_name(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine()
        session = manager.submit(prompt_call("done", "Say {{output:said}}"))
        await manager.get(session, "said")
        known = manager.executor.knowledge.ledger
        await until(lambda: len(known) == 1)
        (context,) = known.of_engine(1)
        await until(lambda: freed(engine) == {context})
        assert len(known) == 0

    run(tiny_model, scenario, session_idle_s=0.2)


def test_a_long_beginning_is_encoded_beside_the_loop(tiny_model: Path) -> None:
    long = " ".join(f"rule {number} says so." for number in range(2000))
    assert len(long) > 16 * 1024

    async def scenario(manager: Manager) -> None:
        limits = {"num_tokens": 2**20, "max_model_len": 2**18}
        busy = await manager.add_engine(name="engine-0", **limits)
        idle = await manager.add_engine(name="engine-1", **limits)
        busy.held = True
        session = manager.submit(PRODUCER, prompt_call("wait", long + " {{input:code}} {{output:review}}"))
        await until(lambda: counters(manager).finished == 1)
        fill = idle.early_fills[0]
        assert not manager.executor.early._encoding
        await busy.answer(busy.dispatches[0])
        assert await manager.get(session, "review", timeout_ms=120_000) == "ok"
        ids = idle._first_ids(idle.dispatches[0])
        assert ids[: len(idle._first_ids(fill))] == idle._first_ids(fill)

    run(tiny_model, scenario)


def simulate(num_engines: int, *off: str) -> tuple[float, float]:
    """Seconds until a plan is there, and from then until the program of one who waited with 3,600 tokens of
    rules: on engines that cost what a 7B model costs."""
    cost = wire.CostModel(4560.0, 12.8, 21.1, 0.1234, 230_400, 14_400)
    calls = [
        simulation.call(simulation.text(0, 250), "plan", max_tokens=880),
        simulation.call(simulation.text(100, 3600), "code", ["plan"], max_tokens=50),
    ]

    async def main(loop: SimulatedLoop) -> tuple[float, float]:
        config = simulation.manager_config(off)
        tokenizer, words = simulation.words_tokenizer(), simulation.made_up_text()
        engines = [EngineSpec(cost)] * num_engines
        async with running_cluster(loop, config, tokenizer, engines, words) as cluster:
            session = cluster.service.create_session().session_id
            cluster.service.submit(simulation.body(session, calls, [("code", "LATENCY")]))
            times = []
            for name in ("plan", "code"):
                await cluster.service.get(api.GetBody(session_id=session, semantic_var_id=name))
                times.append(loop.time())
            return times[0], times[1] - times[0]

    return run_simulated(main)


def test_an_idle_engine_saves_the_time_of_the_prefix_and_a_busy_one_loses_a_hundredth() -> None:
    plan, code = simulate(2, "early_fill")
    plan_filled, code_filled = simulate(2)
    assert plan_filled == plan
    assert code - code_filled > 0.9 * 3600 * 21.1e-6
    plan, code = simulate(1, "early_fill")
    plan_filled, code_filled = simulate(1)
    assert plan_filled < 1.011 * plan
    assert code_filled < code


def test_a_dependent_call_goes_where_its_context_is(tiny_model: Path) -> None:
    """The second turn of a conversation while both engines are idle; without affinity the first gets it."""
    turns = (
        prompt_call("first", ROLE + "{{output:a}}"),
        prompt_call("second", ROLE + "{{input:a}} and then? {{output:b}}"),
    )
    engines: dict[bool, str | None] = {}

    def scenario_with(affinity: bool) -> Callable[[Manager], Awaitable[None]]:
        async def scenario(manager: Manager) -> None:
            busy, other = await two_engines(manager)
            other.held = True
            manager.submit(prompt_call("busy", "Something else {{output:x}}"))
            await until(lambda: bool(busy.dispatches))
            session = manager.submit(*turns)
            await until(lambda: bool(other.dispatches))
            busy.held = other.held = False
            await busy.answer(busy.dispatches[0])
            await until(lambda: manager.registry.alive[0].num_dispatched == 0)
            await other.answer(other.dispatches[0])
            assert await manager.get(session, "b") == "ok"
            calls = manager.service.graph(session).calls
            assert calls[0].engine == "engine-1"
            engines[affinity] = calls[1].engine

        return scenario

    for affinity in (True, False):
        config = SchedulerConfig(prefix_affinity=affinity)
        run(tiny_model, scenario_with(affinity), scheduler=config, early_fill=False)
    assert engines == {True: "engine-1", False: "engine-0"}
