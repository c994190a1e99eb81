"""What ends calls and sessions before their time: cancelling, deleting, idling, deadlines, draining."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import pytest

from graph_builder import body, prompt_call, read, write
from manager_harness import CHAIN, Manager, last_word, run, until
from parrot import api, errors, wire
from parrot.api import SamplingBody
from parrot.manager.slices import run_whole
from parrot.manager.transform_worker import TransformWorker
from parrot.manager.transforms import Failure, Work


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
        session = manager.submit(*CHAIN)
        await until(lambda: len(engine.dispatches) == 1)
        if way == "cancel":
            manager.service.cancel(api.CancelBody(session_id=session, semantic_var_id="a"))
        elif way == "delete":
            manager.service.delete_session(session)
        else:
            body = api.GetBody(session_id=session, semantic_var_id="c", criteria="DEADLINE", target_ms=50.0)
            with pytest.raises(errors.DeadlineExceeded):
                await manager.service.get(body)
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
        await until(lambda: manager.service.num_sessions == 1)
        with pytest.raises(errors.SessionNotFound):
            manager.service.graph(idle)
        await manager.add_engine(last_word)
        assert await waiting == "hello!"

    run(tiny_model, scenario, session_idle_s=0.3)


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


def test_draining_refuses_new_work_and_waits_for_what_runs(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(last_word)
        engine.held = True
        session = manager.submit(CHAIN[0])
        await until(lambda: len(engine.dispatches) == 1)
        drained = asyncio.create_task(manager.executor.drain(600.0))
        await asyncio.sleep(0.01)
        with pytest.raises(errors.Unavailable):
            manager.submit(CHAIN[0])
        await engine.answer(engine.dispatches[0])
        await asyncio.wait_for(drained, 120.0)
        assert await manager.get(session, "a") == "hello!"

    run(tiny_model, scenario)


def test_draining_waits_for_a_value_that_is_still_transformed_and_for_what_reads_it(tiny_model: Path) -> None:
    lines = [{"op": "lines", "bullets": True}, {"op": "item", "index": -1}]
    text = "\n".join(f"{number}. word" for number in range(5000))
    calls = (
        prompt_call("first", "List {{output:x}}", write("x", transforms=lines)),
        prompt_call("second", "Say {{input:x}} {{output:y}}", read("x")),
    )

    async def scenario(manager: Manager) -> None:
        engine = await manager.add_engine(lambda prompt: text if "List" in prompt else "last")
        worker, may_work = manager.executor.deferrals.worker, asyncio.Event()

        async def work_later(work: Work) -> tuple[str | Failure, float]:
            await may_work.wait()
            return await TransformWorker.run(worker, work)

        with patch.object(worker, "run", work_later):
            session = manager.submit(*calls)
            await until(lambda: manager.executor.deferrals.num_pending == 1)
            await until(lambda: manager.executor.dispatcher.num_busy == 0)
            drained = asyncio.create_task(manager.executor.drain(600.0))
            await asyncio.sleep(0.01)
            assert not drained.done()
            may_work.set()
            await asyncio.wait_for(drained, 120.0)
        assert len(engine.dispatches) == 2
        assert await manager.get(session, "y", timeout_ms=0) == "last"

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


def test_a_large_session_is_recorded_and_freed_while_the_loop_turns(tiny_model: Path) -> None:
    """More calls than are recorded or freed in one turn: all of them are, and what they held goes."""

    async def scenario(manager: Manager) -> None:
        calls = [prompt_call(f"C{number}", f"{{{{output:o{number}}}}}") for number in range(600)]
        session_id = manager.submit(*calls)
        graph = manager.service._sessions.get(session_id).graph
        manager.service.delete_session(session_id)
        assert manager.executor.num_live == 0
        assert manager.executor.counts.by_state.total() < 600
        await until(lambda: manager.executor.counts.by_state["cancelled"] == 600)
        assert len(manager.executor.history.last(1000)) == 600
        await until(lambda: not manager.executor._releasing)
        assert not graph.calls

    run(tiny_model, scenario)


def test_a_session_that_is_deleted_while_a_submit_is_taken_leaves_nothing_behind(tiny_model: Path) -> None:
    """After each pause of it, also between the insertion of calls, some of which end at once, and the end."""
    fails = read("x", value="no number", transforms=[{"op": "to-number"}])
    calls = [prompt_call("bad", "{{input:x}} {{output:a}}", fails), prompt_call("good", "{{output:b}}")]

    async def scenario(manager: Manager) -> None:
        executor, num_pauses, is_done = manager.executor, 0, False
        while not is_done:
            num_pauses += 1
            session = manager.service.create_session().session_id
            submitted = body(*calls).model_copy(update={"session_id": session})
            work = manager.service.submitting(submitted)
            is_done = len(list(islice(work, num_pauses))) < num_pauses
            manager.service.delete_session(session)
            with suppress(errors.SessionClosed, errors.SessionNotFound):
                run_whole(work)
            assert executor.num_live == 0
            assert executor.tenants.get("default").num_unfinished == 0
        await until(lambda: not executor._ended)
        manager.check_at_rest()
        assert executor.counts.by_state["failed"] > 1  # in more than the last round

    run(tiny_model, scenario)
