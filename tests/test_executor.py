"""The executor with a real registry, scheduler and tokenizer, and engines that answer from a script."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from graph_builder import prompt_call, read, write
from manager_harness import CHAIN, Manager, last_word, run, until
from parrot import api, errors, wire
from parrot._core import Placement
from parrot.config import SchedulerConfig
from parrot.manager import event_log
from parrot.manager.clock import now_us, simulated_clock
from parrot.manager.early_fill import EarlyFills
from parrot.manager.knowledge import PrefixKnowledge
from parrot.manager.pace import Pace
from parrot.manager.replies import ReplyHandler


def test_values_flow_through_a_chain_of_calls(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        session = manager.submit(*CHAIN)
        assert await manager.get(session, "c") == "hello!!!"
        assert engine.prompts == ["Say hello ", "Then hello! ", "Last hello!! "]
        await until(lambda: manager.executor.dispatcher.num_busy == 0)
        manager.check_at_rest()

    run(tiny_model, scenario)


def test_a_long_prompt_goes_where_it_takes_fewer_steps(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        short = await manager.add_engine(name="short", max_batch_tokens=1)
        long = await manager.add_engine(name="long", max_batch_tokens=4096)
        session = manager.submit(prompt_call("read", "Say " * 50 + "{{output:a}}"))
        await manager.get(session, "a")
        assert (len(short.prompts), len(long.prompts)) == (0, 1)

    run(tiny_model, scenario)


def test_a_consumer_is_dispatched_at_its_producers_reply_and_not_at_a_heartbeat(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        await manager.add_engine(last_word)
        gaps = []
        for _ in range(5):
            session = manager.submit(*CHAIN)
            await manager.get(session, "c")
            first, second, _ = manager.service.graph(session).calls
            gaps.append(second.timing.dispatched_us - second.timing.ready_us)  # type: ignore[operator]
            assert first.timing.finished_us is not None
        assert max(gaps) < 30_000_000

    run(tiny_model, scenario, heartbeat_s=60.0)


def test_the_processor_is_given_away_between_what_comes_after_a_dispatch(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    async def scenario(manager: Manager) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ReplyHandler, "keep_contexts", lambda _: seen.append("contexts"))
            patch.setattr(PrefixKnowledge, "tell_uses", lambda _: seen.append("uses"))
            patch.setattr(EarlyFills, "turn", lambda _: seen.append("fills"))
            patch.setattr("os.sched_yield", lambda: seen.append("yield"))
            manager.executor.turn()

    run(tiny_model, scenario)
    assert seen == ["contexts", "yield", "yield", "uses", "yield", "fills", "yield"]


def test_an_output_used_before_a_later_input_continues_from_the_generated_ids(tiny_model: Path) -> None:
    two = prompt_call("two", "Q {{output:a}} then {{input:late}} {{output:b}}")

    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(lambda text: "mid" if "then" not in text else "end")
        session = manager.submit(two, variables=[{"semantic_var_id": "late"}])
        assert await manager.get(session, "a") == "mid"
        manager.service.set_value(api.SetBody(session_id=session, semantic_var_id="late", value="now"))
        assert await manager.get(session, "b") == "end"
        assert engine.prompts == ["Q ", "Q mid then now "]

    run(tiny_model, scenario)


def test_consecutive_ready_outputs_travel_in_one_frame(tiny_model: Path) -> None:
    two = prompt_call("two", "Q {{output:a}} and {{output:b}}")

    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(lambda text: "B" if "and" in text else "A")
        session = manager.submit(two)
        assert await manager.get(session, "b") == "B"
        kinds = [type(verb).__name__ for verb in engine.dispatches[0].verbs]
        assert kinds == ["Fill", "Generate", "Fill", "Generate"]
        assert len(engine.dispatches) == 1

    run(tiny_model, scenario)


@pytest.mark.parametrize("error", [errors.EngineError, errors.PromptTooLong])
def test_an_engines_error_is_the_calls_error_and_names_its_function(
    tiny_model: Path, error: type[errors.ParrotError]
) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(*CHAIN)
        await until(lambda: len(engine.dispatches) == 1)
        info = errors.ErrorInfo(error.code, "it failed")
        await engine.send(wire.CallFailed(engine.dispatches[0].call_id, info))
        with pytest.raises(error, match=r"^first: it failed"):
            await manager.get(session, "a")
        with pytest.raises(errors.UpstreamFailed):
            await manager.get(session, "c")
        manager.check_at_rest()

    run(tiny_model, scenario)


def test_labels_reach_the_calls_that_are_queued_already(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word, max_batch_size=1)
        engine.held = True
        session = manager.submit(*CHAIN)
        await until(lambda: len(engine.dispatches) == 1)
        assert engine.dispatches[0].objective == "THROUGHPUT"
        body = api.GetBody(session_id=session, semantic_var_id="c", criteria="LATENCY", timeout_ms=0)
        await manager.service.get(body)
        await engine.answer(engine.dispatches[0])
        await until(lambda: len(engine.dispatches) == 2)
        assert engine.dispatches[1].objective == "LATENCY"

    run(tiny_model, scenario)


def test_a_deadline_that_comes_near_makes_its_calls_latency_bound(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        engine.held = True
        session = manager.submit(*CHAIN)
        application = manager.executor.application_of(manager.service._sessions.get(session))
        graph, objectives = application.session.graph, manager.executor._objectives
        objectives.pace = Pace(base_us=400_000)
        graph.label("c", "DEADLINE", target_ms=602_900, now_us=now_us())
        manager.executor.relabel(application)
        await until(lambda: graph.review_us is not None)
        assert {call.objective for call in graph.calls.values()} == {"THROUGHPUT"}
        assert application._review is not None
        later_us = now_us() + 602_000_000
        with simulated_clock(lambda: later_us):
            objectives._review_at(application, graph.review_us)  # as it is set: the real timer goes on
            await until(lambda: {call.objective for call in graph.calls.values()} == {"LATENCY"})
        engine.held = False

    run(tiny_model, scenario)


@pytest.mark.usefixtures("garbage_at_rest")
def test_a_wide_submit_does_not_hold_up_the_loop(tiny_model: Path) -> None:
    calls = [
        prompt_call(
            f"c{i}", "Do {{input:x}} {{output:y}}", read("x", value=f"part {i} " * 40), write("y", f"y{i}")
        )
        for i in range(1000)
    ]

    async def scenario(manager: Manager) -> None:
        await manager.add_engine(last_word, max_model_len=4096, num_tokens=65536)
        session = manager.service.create_session().session_id
        body = api.SubmitBody.model_validate(
            {"session_id": session, "calls": [call.model_dump() for call in calls]}
        )
        manager.service.submit(body)
        began, longest = time.thread_time(), 0.0
        last = asyncio.create_task(manager.get(session, "y999", timeout_ms=60_000))
        while not last.done():
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)
        # CPU time of this thread: what other processes take of the machine does not count.
        assert longest < (time.thread_time() - began) / 4

    run(tiny_model, scenario)


def test_ended_calls_are_remembered(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        await manager.add_engine(last_word)
        session = manager.submit(*CHAIN)
        await manager.get(session, "c")
        views = manager.executor.history.last(2)
        assert [view.function for view in views] == ["second", "third"]
        timing = views[0].timing
        times = [
            timing.submitted_us,
            timing.ready_us,
            timing.dispatched_us,
            timing.admitted_us,
            timing.finished_us,
        ]
        assert times == sorted(times)  # type: ignore[type-var]
        assert views[0].state == "done"
        assert views[0].prompt_tokens > 0

    run(tiny_model, scenario)


def test_a_session_arrives_anew_when_it_had_nothing_left_to_do(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word, held=True)
        session = manager.submit(CHAIN[0])
        manager.submit(CHAIN[1], session_id=session)
        await until(lambda: len(engine.dispatches) == 1)
        engine.held = False
        await engine.answer(engine.dispatches[0])
        await manager.get(session, "b")
        manager.submit(prompt_call("late", "Again {{input:a}} {{output:d}}"), session_id=session)
        await manager.get(session, "d")
        first, second, third = (dispatch.app_arrival_us for dispatch in engine.dispatches)
        assert first == second < third

    run(tiny_model, scenario)


def test_members_of_a_group_that_one_frame_makes_ready_are_placed_together(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parrot.manager.executor._REPLIES_S", -1.0)  # a turn after each call that ends
    names = [f"{number}" for number in range(6)]
    makers = [prompt_call(f"make{name}", f"Make {name} {{{{output:a{name}}}}}") for name in names]
    readers = [prompt_call(f"read{n}", f"Read {{{{input:a{n}}}}} {{{{output:b{n}}}}}") for n in names]
    holes = " ".join(f"{{{{input:b{name}}}}}" for name in names)
    join = prompt_call("join", f"Join {holes} {{{{output:all}}}}")

    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word, held=True)
        label = {"semantic_var_id": "all", "criteria": "LATENCY"}
        session = manager.submit(*makers, *readers, join, labels=[label])
        await until(lambda: len(engine.dispatches) == len(names))
        bridge = manager.executor.scheduler
        schedule, sizes = bridge.schedule, list[int]()

        def counted() -> list[Placement]:
            placements = schedule()
            sizes.append(len(placements))
            return placements

        bridge.schedule = counted  # type: ignore[method-assign]
        engine.held = False
        await engine.send(*(reply for one in engine.dispatches for reply in engine._replies(one)))
        assert await manager.get(session, "all") is not None
        assert [size for size in sizes if size] == [len(names), 1]

    run(tiny_model, scenario)


def test_the_scheduler_is_told_for_how_long_an_application_has_run(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "events"

    async def scenario(manager: Manager) -> None:
        await manager.add_engine(last_word)
        await manager.get(manager.submit(*CHAIN), "c")

    run(tiny_model, scenario, scheduler=SchedulerConfig(record=log))
    with log.open("rb") as events:
        ran_us = [named["app_ran_us"] for name, _, named, _ in event_log._read(events) if name == "submit"]
    assert ran_us[0] == 0
    assert 0 < ran_us[1] < ran_us[2]
