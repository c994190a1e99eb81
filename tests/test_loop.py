"""Simulated time: it stands while there is work, and jumps to the next timer when there is none."""

from __future__ import annotations

import asyncio
import time

import pytest

from parrot.errors import InternalError
from parrot.manager.clock import now_us
from parrot.simulation.loop import SimulatedLoop, run_simulated


def test_a_day_of_timers_passes_at_once_and_in_order() -> None:
    seen: list[tuple[str, int]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, now_us()))

    async def main(loop: SimulatedLoop) -> None:
        await asyncio.gather(sleeper("late", 86_400), sleeper("early", 0.25), sleeper("middle", 3600))

    started = time.monotonic()
    run_simulated(main)
    assert time.monotonic() - started < 60
    assert seen == [("early", 250_000), ("middle", 3_600_000_000), ("late", 86_400_000_000)]


def test_the_real_clock_is_back_afterwards() -> None:
    async def main(loop: SimulatedLoop) -> int:
        return now_us()

    assert run_simulated(main) == 0
    before_us = time.monotonic_ns() // 1000
    assert before_us <= now_us() <= time.monotonic_ns() // 1000


def test_timers_for_the_same_time_go_in_the_order_in_which_they_were_set() -> None:
    seen: list[tuple[int, int]] = []

    async def main(loop: SimulatedLoop) -> None:
        for number in range(50):
            for when_us in (3, 1, 2):
                loop.call_at_us(when_us, seen.append, (when_us, number))
        await asyncio.sleep(1)

    run_simulated(main)
    assert seen == sorted(seen)
    assert len(seen) == 150


def test_work_for_threads_is_done_on_the_spot() -> None:
    async def main(loop: SimulatedLoop) -> list[str]:
        order: list[str] = []
        task = asyncio.create_task(asyncio.to_thread(order.append, "thread"))
        await asyncio.sleep(0)
        order.append("after")
        await task
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        return order

    assert run_simulated(main) == ["thread", "after"]


def test_a_simulation_in_which_nothing_can_happen_says_so() -> None:
    async def main(loop: SimulatedLoop) -> None:
        await loop.create_future()

    with pytest.raises(InternalError, match="stands still"):
        run_simulated(main)
