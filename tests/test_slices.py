"""Long work in slices: the loop runs in between, results and errors come out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator

import pytest

from parrot.manager.slices import SLICE_S, run_in_slices, run_whole


def work(steps: int, step_s: float) -> Generator[None, None, str]:
    for _ in range(steps):
        end = time.perf_counter() + step_s
        while time.perf_counter() < end:
            pass
        yield
    return "done"


def failing() -> Generator[None, None, str]:
    yield
    raise ValueError("no")


def test_both_ways_give_the_result() -> None:
    assert run_whole(work(3, 0)) == asyncio.run(run_in_slices(work(3, 0))) == "done"


def test_the_loop_runs_once_per_slice() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        counting = asyncio.create_task(count())
        await run_in_slices(work(20, SLICE_S))
        counting.cancel()

    asyncio.run(main())
    assert turns >= 19


def test_short_work_does_not_wait_for_the_loop() -> None:
    async def main() -> int:
        others = 0

        async def other() -> None:
            nonlocal others
            others += 1

        task = asyncio.create_task(other())
        await run_in_slices(work(10, 0))
        done = others
        await task
        return done

    assert asyncio.run(main()) == 0


def test_errors_come_out() -> None:
    with pytest.raises(ValueError, match="no"):
        run_whole(failing())
    with pytest.raises(ValueError, match="no"):
        asyncio.run(run_in_slices(failing()))
