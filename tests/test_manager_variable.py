"""Waiting for a variable: many readers, time-outs, and typed errors."""

from __future__ import annotations

import asyncio

import pytest

from parrot.errors import EngineLost, InternalError
from parrot.manager.variable import Variable, VariableState


def test_all_waiters_wake_when_it_ends() -> None:
    async def scene() -> list[bool]:
        variable = Variable("v")
        waits = [asyncio.create_task(variable.wait()) for _ in range(5)]
        await asyncio.sleep(0)
        assert variable.has_waiters
        variable.end("text", None)
        ended = await asyncio.gather(*waits)
        assert not variable.has_waiters
        assert variable.state is VariableState.READY
        assert variable.result() == "text"
        return ended

    assert asyncio.run(scene()) == [True] * 5


def test_a_timeout_leaves_it_pending_and_zero_polls() -> None:
    async def scene() -> None:
        variable = Variable("v")
        assert not await variable.wait(0)
        assert not await variable.wait(0.01)
        assert variable.pending
        assert not variable.has_waiters
        variable.end(None, EngineLost("gone").to_info())
        assert await variable.wait(0)
        with pytest.raises(EngineLost, match="gone"):
            variable.result()

    asyncio.run(scene())


def test_a_waiter_that_is_cancelled_leaves_the_others() -> None:
    async def scene() -> None:
        variable = Variable("v")
        leaver, stayer = (asyncio.create_task(variable.wait()) for _ in range(2))
        await asyncio.sleep(0)
        leaver.cancel()
        variable.end("text", None)
        assert await stayer
        assert leaver.cancelled()

    asyncio.run(scene())


def test_reading_a_pending_variable_is_a_bug() -> None:
    with pytest.raises(InternalError):
        Variable("v").result()
