"""Frames for engines go out in order and together, and the owner hears of an engine that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from parrot import wire
from parrot.manager.engine import Engine
from parrot.manager.engine_socket import Receiver
from parrot.manager.frames import FrameOrder
from parrot.manager.outbox import Outbox


def registration(name: str) -> wire.Register:
    model = wire.ModelInfo("tiny", "f", 100, 1024, "float32", "cpu")
    cost = wire.CostModel(1000.0, 10.0, 10.0, 0.01, 100_000, 64)
    return wire.Register(wire.PROTOCOL_VERSION, name, name, 1, model, cost, 64)


class Socket:
    """Sends to all but those who are ``gone``."""

    address = local_address = "nowhere"

    def __init__(self) -> None:
        self.sent: list[tuple[bytes | wire.ToEngine, ...]] = []  # identity and messages
        self.gone: set[bytes] = set()

    def send(self, identity: bytes, frames: Sequence[bytes]) -> bool:
        if identity not in self.gone:
            self.sent.append((identity, *map(wire.decode_to_engine, frames)))
        return identity not in self.gone

    def start(self, receive: Receiver) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def abort(number: int) -> wire.Abort:
    return wire.Abort((wire.CallId(number),))


def run(scenario: Callable[[Outbox, Socket, list[Engine], list[Engine]], None]) -> Socket:
    """On a loop; what is left goes out in its next turn."""

    async def main() -> Socket:
        socket, lost = Socket(), list[Engine]()
        engines = [
            Engine(number, b"%d" % number, registration(f"e{number}"), "m", 0.0, frames=FrameOrder(0))
            for number in (1, 2)
        ]
        scenario(Outbox(socket, unreachable=lost.append), socket, engines, lost)
        await asyncio.sleep(0)
        return socket

    return asyncio.run(main())


def test_frames_go_out_together_at_a_flush_or_in_the_next_turn_in_the_order_they_came_in() -> None:
    def scenario(outbox: Outbox, socket: Socket, engines: list[Engine], _: list[Engine]) -> None:
        first, second = engines
        outbox.put(first, abort(1))
        outbox.put(second, abort(2))
        outbox.put(first, abort(4))
        assert not socket.sent
        outbox.flush()
        assert socket.sent == [(b"1", abort(1), abort(4)), (b"2", abort(2))]
        outbox.put(b"stranger", wire.Shutdown())
        outbox.put(first, abort(3))

    assert run(scenario).sent[2:] == [(b"stranger", wire.Shutdown()), (b"1", abort(3))]


def test_what_is_freed_goes_out_in_one_frame_behind_the_rest_and_not_to_the_dead() -> None:
    def scenario(outbox: Outbox, _: Socket, engines: list[Engine], __: list[Engine]) -> None:
        first, second = engines
        second.state = "lost"
        for number in (5, 6):
            outbox.free_later(first, wire.ContextId(number))
            outbox.free_later(second, wire.ContextId(number))
        outbox.put(first, abort(1))
        outbox.flush()
        assert first.num_sent == 0

    freed = wire.FreeContexts((wire.ContextId(5), wire.ContextId(6)))
    assert run(scenario).sent == [(b"1", abort(1)), (b"1", freed)]


def test_the_owner_hears_of_an_engine_that_is_gone_and_the_others_get_theirs() -> None:
    def scenario(outbox: Outbox, socket: Socket, engines: list[Engine], lost: list[Engine]) -> None:
        first, second = engines
        socket.gone = {b"1", b"stranger"}
        outbox.put(first, abort(1))
        outbox.put(b"stranger", wire.Shutdown())
        outbox.put(second, abort(2))
        outbox.flush()
        assert lost == [first]

    assert run(scenario).sent == [(b"2", abort(2))]
