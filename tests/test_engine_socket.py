"""The manager's socket: the way in for engines of the same machine, and messages on the loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from parrot.manager import engine_socket
from parrot.manager.engine_socket import RouterSocket


@contextmanager
def dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


def with_router(scenario: Callable[[RouterSocket, asyncio.Queue[list[bytes]]], Awaitable[None]]) -> None:
    async def main() -> None:
        router, arrived = RouterSocket("127.0.0.1", 0), asyncio.Queue[list[bytes]]()
        router.start(arrived.put_nowait)
        try:
            await scenario(router, arrived)
        finally:
            router.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["address", "local_address"])
def test_frames_go_both_ways_and_those_sent_together_arrive_together(name: str) -> None:
    async def scenario(router: RouterSocket, arrived: asyncio.Queue[list[bytes]]) -> None:
        with dealer(getattr(router, name)) as engine:
            engine.send(b"hello")
            identity, frame = await asyncio.wait_for(arrived.get(), 60)
            assert frame == b"hello"
            assert router.send(identity, [b"one", b"two", b"three"])
            assert await asyncio.to_thread(engine.poll, 60_000)
            assert engine.recv_multipart() == [b"one", b"two", b"three"]
        assert not router.send(b"nobody", [b"one", b"two"])

    with_router(scenario)


def test_the_way_in_for_this_machine_leaves_no_file() -> None:
    async def scenario(router: RouterSocket, _: asyncio.Queue[list[bytes]]) -> None:
        assert router.local_address.startswith("ipc://@")  # of Linux: a name, and no path
        other = RouterSocket("127.0.0.1", 0)
        assert other.local_address != router.local_address
        other.close()

    with_router(scenario)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_other_users_of_this_machine_do_not_get_through() -> None:
    async def scenario(router: RouterSocket, arrived: asyncio.Queue[list[bytes]]) -> None:
        stranger = os.fork()
        if stranger == 0:
            os.setuid(65534)
            with dealer(router.local_address) as engine:
                engine.send(b"stranger")
                signal.pause()
        try:
            await asyncio.sleep(0.5)
            assert arrived.empty()
            with dealer(router.local_address) as engine:
                engine.send(b"friend")
                assert (await asyncio.wait_for(arrived.get(), 60))[1] == b"friend"
            assert arrived.empty()
        finally:
            os.kill(stranger, signal.SIGKILL)
            os.waitpid(stranger, 0)

    with_router(scenario)


def test_many_messages_leave_turns_to_others_and_none_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_socket, "_TURN_S", 0.0)  # one message a turn
    count = 200

    async def scenario(router: RouterSocket, arrived: asyncio.Queue[list[bytes]]) -> None:
        with dealer(router.address) as engine:
            engine.send(b"first")
            identity, _ = await asyncio.wait_for(arrived.get(), 60)
            for _ in range(count):
                engine.send(b"x")
            most = 0
            while arrived.qsize() < count:
                before = arrived.qsize()
                await asyncio.sleep(0)
                most = max(most, arrived.qsize() - before)
                # A send may be what takes note of an arrival.
                assert router.send(identity, [b"y"])
            assert most <= 2

    with_router(scenario)


class Counted:
    """A socket that counts what is received from it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, *arguments: Any, **named: Any) -> Any:
        self.count += 1
        return self._socket.recv(*arguments, **named)


def test_a_message_of_many_parts_is_cut_and_the_rest_dropped_in_many_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_socket, "_TURN_S", 0.0)

    async def scenario(router: RouterSocket, arrived: asyncio.Queue[list[bytes]]) -> None:
        counted = Counted(router._socket)
        router._socket = counted  # type: ignore[assignment]
        with dealer(router.address) as hostile, dealer(router.address) as engine:
            hostile.send_multipart([b"%d" % number for number in range(1000)])
            hostile.send(b"next")
            most = 0
            while arrived.qsize() < 2:
                before = counted.count
                await asyncio.sleep(0)
                most = max(most, counted.count - before)
            assert most <= 4  # the parts handed over, or one that is dropped, and one that is not there
            assert counted.count > 1000
            assert router.take_blocked_s() > 0
            assert router.take_blocked_s() == 0
            assert [parts[1:] for parts in (arrived.get_nowait(), arrived.get_nowait())] == [
                [b"0", b"1"],
                [b"next"],
            ]
            engine.send(b"still here")
            assert (await asyncio.wait_for(arrived.get(), 60))[1] == b"still here"

    with_router(scenario)
