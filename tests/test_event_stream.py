"""The stream of an OpenAI answer whose client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.types import Message

from parrot.manager.openai_api import _EventStream


def test_a_client_that_leaves_ends_a_stream_of_which_every_turn_of_the_loop_has_more() -> None:
    assert asyncio.run(_num_events_of_one_that_left(most=1000)) < 100


async def _num_events_of_one_that_left(most: int) -> int:
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()
    num_events, has_left = 0, False

    def make() -> None:
        nonlocal num_events
        if has_left or num_events == most:
            pieces.put_nowait(None)
            return
        num_events += 1
        pieces.put_nowait("data: x\n\n")
        loop.call_soon(make)

    async def events() -> AsyncIterator[str]:
        while (piece := await pieces.get()) is not None:
            yield piece

    async def receive() -> Message:
        for _ in range(2):  # then it is known behind the event of its turn, which the stream has not seen
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        """Nobody reads it."""

    def leave() -> None:
        nonlocal has_left
        has_left = True

    make()
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    await _EventStream(events(), leave)(scope, receive, send)
    return num_events
