"""Long work in slices: the loop runs in between, results and errors come out."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator

import pytest

from parrot.manager.clock import simulated_clock
from parrot.manager.slices import SLICE_S, run_in_slices, run_whole

LONG_S = 2 * SLICE_S  # a step that uses up a slice
passed_us = 0


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    """Time passes in the steps of :func:`work` alone, however busy the machine is."""
    with simulated_clock(lambda: passed_us):
        yield


def work(steps: int, step_s: float) -> Generator[None, None, str]:
    global passed_us
    for _ in range(steps):
        passed_us += round(step_s * 1e6)
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
        await run_in_slices(work(20, LONG_S))
        counting.cancel()

    asyncio.run(main())
    assert turns >= 19


def test_many_pieces_of_work_share_the_slices() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        counting = asyncio.create_task(count())
        await asyncio.gather(*(run_in_slices(work(5, LONG_S)) for _ in range(10)))
        counting.cancel()

    asyncio.run(main())
    assert turns >= 49  # five, if all of them had slices in each turn


def test_slices_come_in_turn_and_those_of_cancelled_work_go_to_others() -> None:
    order: list[int] = []

    def numbered(number: int) -> Generator[None, None, None]:
        for _ in range(2):
            order.append(number)
            yield from work(1, LONG_S)

    async def main() -> None:
        tasks = [asyncio.create_task(run_in_slices(numbered(number))) for number in range(5)]
        while not order:
            await asyncio.sleep(0)
        tasks[2].cancel()  # while it waits
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    assert order == [0, 0, 1, 3, 4, 1, 3, 4]


def test_work_cancelled_when_its_slice_has_come_passes_it_on() -> None:
    async def main() -> str:
        first, second, third = (asyncio.create_task(run_in_slices(work(1, LONG_S))) for _ in range(3))
        await first  # its end was in the same turn as the beginning of the others' wait
        await asyncio.sleep(0)
        second.cancel()
        return await third

    assert asyncio.run(main()) == "done"


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
