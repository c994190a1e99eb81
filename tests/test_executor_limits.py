"""What the executor refuses: prompts that can never fit, and submits beyond the room in the queue."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from graph_builder import prompt_call, read, write
from machine import slowness
from manager_harness import CHAIN, Manager, last_word, run, until
from parrot import api, errors
from parrot.api import SamplingBody
from parrot.config import SchedulerConfig


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
        with pytest.raises(errors.PromptTooLong, match=rf"^big: .*{numbers}"):
            await manager.get(session, "a")
        assert await manager.get(session, "b") == "hi!"

    run(tiny_model, scenario)


def test_a_hopelessly_long_text_is_refused_before_it_is_tokenised(tiny_model: Path) -> None:
    async def scenario(manager: Manager) -> None:
        await manager.add_engine(last_word)
        text = "x" * (7 * 2**20)
        started = time.process_time()
        session = manager.submit(prompt_call("big", "{{input:x}} {{output:a}}", read("x", value=text)))
        with pytest.raises(errors.PromptTooLong, match=r"^big: .* at least"):
            await manager.get(session, "a")
        assert time.process_time() - started < 0.7 * slowness()  # to tokenise it takes several seconds

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
