"""What a peer can cause again and again fills no log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from manager_harness import Manager, run, until
from parrot.manager.clock import simulated_clock
from parrot.manager.limited_log import EVERY_S, LimitedLog

log = logging.getLogger("parrot.test")


def test_some_lines_a_minute_and_then_how_many_there_were(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 1000.0
    with simulated_clock(lambda: round(now_s * 1e6)):
        limited = LimitedLog(log, most=2)
        for number in range(5):
            limited.line(logging.WARNING, "frame %d", number)
        now_s += EVERY_S
        for number in (5, 6):
            limited.line(logging.WARNING, "frame %d", number)
        now_s += EVERY_S
        limited.line(logging.WARNING, "frame %d", 7)
    assert [record.getMessage() for record in caplog.records] == [
        "frame 0",
        "frame 1",
        "3 lines like the following one were left out",
        "frame 5",
        "frame 6",
        "frame 7",
    ]


def test_frames_that_are_no_messages_are_counted_and_a_few_of_them_logged(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(manager: Manager) -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(manager.registry.address)
        for _ in range(200):
            await socket.send(b"garbage")
        await until(lambda: manager.registry.num_dropped_frames == 200)
        context.destroy(linger=0)

    run(tiny_model, scenario)
    assert sum("dropped frame" in record.getMessage() for record in caplog.records) == 5
