"""The executor with a real registry, scheduler and tokenizer, and engines that answer from a script."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from graph_builder import prompt_call, read, write
from manager_harness import Manager, running_manager, until
from parrot import api, errors, wire
from parrot.api import SamplingBody
from parrot.config import SchedulerConfig
from parrot.manager.clock import now_us
from parrot.manager.pace import Pace

Scenario = Callable[[Manager], Awaitable[None]]


def run(model: Path, scenario: Scenario, **config: object) -> None:
    async def main() -> None:
        async with running_manager(model, **config) as manager:
            await scenario(manager)

    asyncio.run(main())


def last_word(text: str) -> str:
    return text.split()[-1] + "!"


CHAIN = (
    prompt_call("first", "Say {{input:x}} {{output:a}}", read("x", value="hello")),
    prompt_call("second", "Then {{input:a}} {{output:b}}"),
    prompt_call("third", "Last {{input:b}} {{output:c}}"),
)


def test_values_flow_through_a_chain_of_calls(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        session = manager.submit(*CHAIN)
        assert await manager.get(session, "c") == "hello!!!"
        assert engine.prompts == ["Say hello ", "Then hello! ", "Last hello!! "]
        await until(lambda: manager.executor.dispatcher.num_busy == 0)
        manager.check_at_rest()

    run(tiny_model, scenario)


def test_a_consumer_is_dispatched_within_a_millisecond_of_its_producers_reply(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        await manager.add_engine(last_word)
        gaps = []
        for _ in range(5):
            session = manager.submit(*CHAIN)
            await manager.get(session, "c")
            first, second, _ = manager.service.graph(session).calls
            gaps.append(second.timing.dispatched_us - second.timing.ready_us)  # type: ignore[operator]
            assert first.timing.finished_us is not None
        assert min(gaps) < 1000

    run(tiny_model, scenario)


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
        await manager.add_engine(last_word, name="engine-1")
        assert await manager.get(session, "c") == "hello!!!"

    run(tiny_model, scenario)


def test_cancelling_stops_the_running_call_and_late_replies_are_ignored(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        engine.held = True
        session = manager.submit(*CHAIN)
        await until(lambda: len(engine.dispatches) == 1)
        run_id = engine.dispatches[0].call_id
        manager.check_load()
        manager.service.cancel(api.CancelBody(session_id=session, semantic_var_id="a"))
        with pytest.raises(errors.Cancelled):
            await manager.get(session, "a")
        await until(lambda: wire.Abort((run_id,)) in engine.other)
        manager.check_at_rest()
        await engine.answer(engine.dispatches[0])
        engine.held = False
        other = manager.submit(*CHAIN)
        assert await manager.get(other, "c") == "hello!!!"

    run(tiny_model, scenario)


@pytest.mark.parametrize("way", ["cancel", "delete", "deadline"])
def test_what_stops_running_calls_is_one_line_in_the_log(
    tiny_model: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        label = {"semantic_var_id": "c", "criteria": "DEADLINE", "target_ms": 100}
        session = manager.submit(*CHAIN, labels=[label] if way == "deadline" else [])
        await until(lambda: len(engine.dispatches) == 1)
        if way == "cancel":
            manager.service.cancel(api.CancelBody(session_id=session, semantic_var_id="a"))
        elif way == "delete":
            manager.service.delete_session(session)
        await until(lambda: any(isinstance(message, wire.Abort) for message in engine.other))
        manager.check_at_rest()
        lines = [record.message for record in caplog.records if "1 calls stop" in record.message]
        assert len(lines) == 1

    with caplog.at_level(logging.INFO, logger="parrot"):
        run(tiny_model, scenario)


def test_an_interrupted_turn_leaves_the_session_usable(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        session = manager.submit(CHAIN[0])
        assert await manager.get(session, "a") == "hello!"
        engine.held = True
        manager.submit(CHAIN[1], CHAIN[2], session_id=session)
        await until(lambda: len(engine.dispatches) == 2)
        manager.service.cancel(api.CancelBody(session_id=session, semantic_var_id="b"))
        with pytest.raises(errors.UpstreamFailed) as caught:
            await manager.get(session, "c")
        assert caught.value.causes[0].code == "cancelled"
        engine.held = False
        manager.submit(prompt_call("again", "Once more {{input:a}} {{output:d}}"), session_id=session)
        assert await manager.get(session, "d") == "hello!!"
        await until(lambda: manager.executor.dispatcher.num_busy == 0)
        manager.check_at_rest()

    run(tiny_model, scenario)


def test_deleting_a_session_stops_its_calls_and_frees_its_contexts(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        session = manager.submit(CHAIN[0])
        assert await manager.get(session, "a") == "hello!"
        await until(lambda: manager.executor.dispatcher.num_busy == 0)
        done = wire.ContextId(int(engine.dispatches[0].call_id))
        engine.held = True
        manager.submit(CHAIN[1], session_id=session)
        await until(lambda: len(engine.dispatches) == 2)
        waiting = asyncio.create_task(manager.get(session, "b"))
        await asyncio.sleep(0.01)
        manager.service.delete_session(session)
        with pytest.raises(errors.SessionClosed):
            await waiting
        with pytest.raises(errors.SessionNotFound):
            await manager.get(session, "a")
        await until(lambda: any(isinstance(message, wire.Abort) for message in engine.other))
        await until(lambda: wire.FreeContexts((done,)) in engine.other)
        manager.check_at_rest()

    run(tiny_model, scenario)


def test_an_idle_session_expires_and_one_with_a_waiting_get_does_not(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        idle = manager.submit(CHAIN[0])
        busy = manager.submit(CHAIN[0])
        waiting = asyncio.create_task(manager.get(busy, "a"))
        await asyncio.sleep(0.8)
        with pytest.raises(errors.SessionNotFound):
            manager.service.graph(idle)
        await manager.add_engine(last_word)
        assert await waiting == "hello!"

    run(tiny_model, scenario, session_idle_s=0.3)


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [({"max_model_len": 64}, "context of 64 tokens"), ({"num_tokens": 64}, "cache of 64 tokens")],
)
def test_a_prompt_that_can_never_fit_fails_with_the_numbers_and_blocks_nobody(
    tiny_model: Path, limits: dict[str, int], numbers: str
) -> None:
    sampling = SamplingBody(max_tokens=20)
    big = prompt_call("big", "Say {{input:x}} {{output:a}}", read("x", value="word " * 60))
    small = prompt_call(
        "small", "Say {{input:y}} {{output:b}}", read("y", value="hi"), write("b", sampling=sampling)
    )

    async def scenario(manager: Manager) -> None:
        await manager.add_engine(last_word, **limits)
        session = manager.submit(big, small)
        with pytest.raises(errors.PromptTooLong, match=numbers):
            await manager.get(session, "a")
        assert await manager.get(session, "b") == "hi!"

    run(tiny_model, scenario)


def test_a_hopelessly_long_text_is_refused_before_it_is_tokenised(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        await manager.add_engine(last_word)
        text = "x" * (7 * 2**20)
        started = time.monotonic()
        session = manager.submit(prompt_call("big", "{{input:x}} {{output:a}}", read("x", value=text)))
        with pytest.raises(errors.PromptTooLong, match="at least"):
            await manager.get(session, "a")
        assert time.monotonic() - started < 0.5

    run(tiny_model, scenario)


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


def test_an_engines_error_is_the_calls_error(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(*CHAIN)
        await until(lambda: len(engine.dispatches) == 1)
        info = errors.ErrorInfo("engine_error", "the step failed")
        await engine.send(wire.CallFailed(engine.dispatches[0].call_id, info))
        with pytest.raises(errors.EngineError, match="the step failed"):
            await manager.get(session, "a")
        with pytest.raises(errors.UpstreamFailed):
            await manager.get(session, "c")
        manager.check_at_rest()

    run(tiny_model, scenario)


def test_a_full_queue_is_overloaded_and_takes_nothing(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        manager.submit(*CHAIN)
        with pytest.raises(errors.Overloaded):
            manager.submit(*CHAIN)

    run(tiny_model, scenario, max_queued_calls=4)


def test_a_submit_without_room_in_the_queue_is_refused_whole(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True, max_batch_size=1)
        for name in ("runs", "waits"):
            manager.submit(prompt_call(name, "Word {{output:o}}"))
        with pytest.raises(errors.Overloaded, match="max_queued = 1"):
            manager.submit(prompt_call("c", "Word {{output:o}}"))
        await until(lambda: len(engine.dispatches) == 1)
        manager.check_load()

    run(tiny_model, scenario, scheduler=SchedulerConfig(max_queued=1))


def test_a_submit_larger_than_the_room_in_the_queue_takes_nothing(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine()
        calls = [prompt_call(f"c{i}", "Word {{output:o}}", write("o", f"o{i}")) for i in range(3)]
        with pytest.raises(errors.Overloaded, match="3 more would exceed max_queued = 2"):
            manager.submit(*calls)
        assert (manager.executor.num_live, manager.executor.dispatcher.num_busy) == (0, 0)
        # Calls that wait for others are not in the queue yet.
        session = manager.submit(*CHAIN)
        await manager.get(session, "c")
        assert len(engine.dispatches) == len(CHAIN)

    run(tiny_model, scenario, scheduler=SchedulerConfig(max_queued=2))


def test_a_refused_submit_leaves_no_session_behind(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        bad = prompt_call("bad", "{{input:a}} {{output:b}}")
        session_id = "s-" + "1" * 32
        body = {"session_id": session_id, "create_session": True, "calls": [bad.model_dump()]}
        with pytest.raises(errors.ParrotError):
            manager.service.submit(api.SubmitBody.model_validate(body))
        with pytest.raises(errors.SessionNotFound):
            manager.service.graph(session_id)

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


def test_a_get_with_a_deadline_ends_in_time_and_its_calls_stop(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        engine.held = True
        session = manager.submit(*CHAIN)
        await until(lambda: bool(engine.dispatches))
        body = api.GetBody(session_id=session, semantic_var_id="c", criteria="DEADLINE", target_ms=60.0)
        with pytest.raises(errors.DeadlineExceeded):
            await manager.service.get(body)
        assert [call.state for call in manager.service.graph(session).calls] == ["cancelled"] * 3
        await until(lambda: any(isinstance(message, wire.Abort) for message in engine.other))
        engine.held = False
        manager.check_at_rest()

    run(tiny_model, scenario)


def test_a_deadline_that_comes_near_makes_its_calls_latency_bound(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        engine.held = True
        session = manager.submit(*CHAIN)
        graph = manager.executor.application_of(manager.service._sessions.get(session)).session.graph
        manager.executor._objectives.pace = Pace(base_us=400_000)
        graph.label("c", "DEADLINE", target_ms=2_900, now_us=now_us())
        manager.executor.relabel(manager.executor.application_of(manager.service._sessions.get(session)))
        await until(lambda: graph.review_us is not None)
        assert {call.objective for call in graph.calls.values()} == {"THROUGHPUT"}
        await until(lambda: {call.objective for call in graph.calls.values()} == {"LATENCY"})
        engine.held = False

    run(tiny_model, scenario)


def test_draining_refuses_new_work_and_waits_for_what_runs(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        engine.held = True
        session = manager.submit(CHAIN[0])
        await until(lambda: len(engine.dispatches) == 1)
        drained = asyncio.create_task(manager.executor.drain(2.0))
        await asyncio.sleep(0.01)
        with pytest.raises(errors.Unavailable):
            manager.submit(CHAIN[0])
        await engine.answer(engine.dispatches[0])
        await asyncio.wait_for(drained, 1.0)
        assert await manager.get(session, "a") == "hello!"

    run(tiny_model, scenario)


def test_what_does_not_finish_in_time_ends_with_a_typed_error(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(held=True)
        session = manager.submit(CHAIN[0])
        waiting = asyncio.create_task(manager.get(session, "a"))
        await until(lambda: len(engine.dispatches) == 1)
        await manager.executor.drain(0.05)
        manager.service.close()
        with pytest.raises(errors.Unavailable):
            await waiting

    run(tiny_model, scenario)


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
        longest = 0.0
        last = asyncio.create_task(manager.get(session, "y999", timeout_ms=60_000))
        while not last.done():
            before = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - before)
        assert longest < 0.5  # all at once would be some 2 s

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


def test_an_input_that_comes_before_the_engine_has_cleaned_up_is_not_missed(tiny_model: Path) -> None:
    two = prompt_call("two", "Q {{output:a}} then {{input:late}} {{output:b}}")

    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word, held=True)
        session = manager.submit(two, variables=[{"semantic_var_id": "late"}])
        await until(lambda: len(engine.dispatches) == 1)
        await engine.answer(engine.dispatches[0], num_outputs=1)
        assert await manager.get(session, "a") == "Q!"
        engine.held = False
        manager.service.set_value(api.SetBody(session_id=session, semantic_var_id="late", value="now"))
        assert await manager.get(session, "b") == "now!"

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


def test_a_cut_typed_output_ends_its_call_and_what_reads_it_and_stops_the_engine(tiny_model: Path) -> None:
    typed = write("a", sampling=SamplingBody(choices=("yes", "no"), max_tokens=1))
    two = prompt_call("two", "Q {{output:a}} then {{output:b}}", typed)
    reader = prompt_call("reader", "About {{input:a}} {{output:c}}")

    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word, held=True)
        session = manager.submit(two, reader)
        await until(lambda: len(engine.dispatches) == 1)
        dispatch = engine.dispatches[0]
        verbs = [type(verb).__name__ for verb in dispatch.verbs]
        assert verbs == ["Fill", "Generate", "Fill", "Generate"]
        timing = wire.Timing(1, 1, 1, 1)
        cut = wire.GenerateDone(dispatch.call_id, 1, "ye", wire.pack_ids([5]), 1, "length", timing)
        await engine.send(cut)
        for variable in ("a", "b"):
            with pytest.raises(errors.TypedOutputFailed, match="'a' was cut by max_tokens = 1") as caught:
                await manager.get(session, variable)
            assert caught.value.param == "a"
        with pytest.raises(errors.UpstreamFailed, match="cut by max_tokens"):
            await manager.get(session, "c")
        await until(lambda: wire.Abort((dispatch.call_id,)) in engine.other)
        assert len(engine.dispatches) == 1
        manager.check_at_rest()

    run(tiny_model, scenario)
