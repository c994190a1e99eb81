"""The engine registry, against real DEALER sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from unittest.mock import Mock

import msgspec
import pytest
import zmq
import zmq.asyncio

from parrot import wire
from parrot.config import ManagerConfig
from parrot.errors import PortInUse
from parrot.manager.clock import now_us
from parrot.manager.engines import EngineRegistry
from parrot.manager.readiness import unready_reason
from parrot.manager.service import Service
from registry_harness import CONFIG, Peer, Recorder, register, stats, time_out, until, with_registry


def test_an_engine_registers_and_its_replies_arrive() -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        engine = peer()
        await engine.send(register("e1"))
        assert isinstance(await engine.receive(), wire.Ping)
        done = wire.CallDone(wire.CallId(7), wire.ContextId(3), 10)
        await engine.send(wire.StepReplies("e1", (done,), stats(now_us())))
        await until(lambda: events.replies == [done])
        registry.send(registry.alive[0], wire.Abort((wire.CallId(7),)))
        while isinstance(message := await engine.receive(), wire.Ping):
            pass
        assert message == wire.Abort((wire.CallId(7),))
        assert registry.views()[0].stats["num_steps"] == 0

    with_registry(scenario)


def test_a_silent_engine_is_lost_and_one_that_beats_is_not() -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        silent, live = peer(), peer()
        await silent.send(register("e1", "silent"))
        await live.send(register("e2", "live"))
        await until(lambda: len(events.joined) == 2)
        num_beats = events.num_heartbeats
        while not events.lost or events.num_heartbeats < num_beats + 3:
            time_out(registry, "silent")
            await live.send(wire.Heartbeat("e2", stats(now_us())))
            await asyncio.sleep(0.01)
        assert [engine.name for engine, _ in events.lost] == ["silent"]
        assert [engine.name for engine in registry.alive] == ["live"]
        assert {view.name: view.alive for view in registry.views()} == {"silent": False, "live": True}

    with_registry(scenario)


@pytest.mark.parametrize("reason", ["the loop stood still", "a peer held up the others"])
def test_time_in_which_an_engine_could_not_be_heard_is_no_silence_of_it(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        live = peer()
        await live.send(register("e1"))
        await until(lambda: len(events.joined) == 1)
        engine, num_beats = events.joined[0], events.num_heartbeats
        engine.num_dispatched = 1  # it has work, and so should make steps
        stood_still_s = 2 * max(CONFIG.lost_after_s, CONFIG.stall_after_s)
        if reason == "the loop stood still":
            registry._last_beat -= stood_still_s
        else:
            blocked = [stood_still_s]
            monkeypatch.setattr(registry._socket, "take_blocked_s", lambda: blocked.pop() if blocked else 0.0)
        engine.last_seen -= stood_still_s
        engine.progress.since -= stood_still_s
        await until(lambda: events.num_heartbeats > num_beats + 1)
        assert events.lost == []

    with_registry(scenario)


def test_an_engine_that_stays_silent_has_hung_until_it_registers_again() -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        silent = peer()
        await silent.send(register("e1", "silent"))
        await until(lambda: len(events.joined) == 1)
        time_out(registry, "silent")
        await until(lambda: len(events.lost) == 1)
        pid = events.joined[0].registration.pid
        assert not registry.has_hung(pid)
        events.joined[0].last_seen -= 2 * CONFIG.lost_after_s
        await until(lambda: registry.has_hung(pid))
        assert not registry.has_hung(pid + 1)
        await silent.send(register("e1", "silent"))
        await until(lambda: len(registry.alive) == 1)
        assert not registry.has_hung(pid)

    with_registry(scenario)


def test_a_new_epoch_under_an_old_name_means_that_the_old_engine_died() -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        first, second = peer(), peer()
        await first.send(register("e1"))
        await until(lambda: len(events.joined) == 1)
        await second.send(register("e2"))
        await until(lambda: len(events.joined) == 2)
        assert [engine.engine_id for engine, _ in events.lost] == [events.joined[0].engine_id]
        assert events.joined[1].engine_id != events.joined[0].engine_id

    with_registry(scenario)


def test_a_process_whose_name_another_has_taken_is_told_to_end() -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        old, new = peer(), peer()
        await old.send(register("e1"))
        assert isinstance(await old.receive(), wire.Ping)
        await new.send(register("e2"))
        assert isinstance(await new.receive(), wire.Ping)
        for message in (wire.Heartbeat("e1", stats(now_us())), register("e1")):
            await old.send(message)
            while isinstance(answer := await old.receive(), wire.Ping):
                pass
            assert answer == wire.Shutdown()
        assert [engine.registration.epoch for engine in registry.alive] == ["e2"]
        assert len(events.lost) == 1

    with_registry(scenario)


def test_replies_to_calls_of_an_earlier_manager_are_dropped() -> None:
    """A manager counts calls from 1 again, so the id of a reply does not tell whose call it ends."""

    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        engine = peer()
        await engine.send(register("e1"))
        greeting = await engine.receive()
        assert isinstance(greeting, wire.Ping)
        stale, done = (wire.CallDone(wire.CallId(1), wire.ContextId(1), length) for length in (5, 9))
        await engine.send(wire.StepReplies("e1", (stale,), stats(now_us()), "another manager"))
        await engine.send(wire.StepReplies("e1", (done,), stats(now_us()), greeting.manager_id))
        await until(lambda: bool(events.replies))
        assert events.replies == [done]

    with_registry(scenario)


def test_what_steps_have_come_to_take_is_told_once_and_shown() -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        engine = peer()
        await engine.send(register("e1"))
        await until(lambda: len(events.joined) == 1)
        fresh = wire.StepCost(10_000.0, 100.0, 10.0, 1.0)
        for cost in (None, fresh, fresh, wire.StepCost(1.0, 1.0, 1.0, 0.1), fresh):
            await engine.send(wire.Heartbeat("e1", stats(now_us()), cost=cost))
        await until(lambda: len(events.repriced) == 3)
        joined = register("e1").cost_model
        assert events.repriced[1] == joined
        assert events.repriced[2] == wire.CostModel(10_000.0, 100.0, 10.0, 1.0, 4096, 256)
        (view,) = registry.views()
        assert view.cost_model == msgspec.structs.asdict(events.repriced[2])
        assert view.num_cost_changes == 3
        assert view.capacity_tokens_at == {"20 ms": 4096, "40 ms": 4096, "80 ms": 4096}
        await engine.send(wire.Heartbeat("e1", stats(now_us()), cost=wire.StepCost(18_000.0, 0.0, 10.0, 1.0)))
        await until(lambda: len(events.repriced) == 4)
        assert registry.views()[0].capacity_tokens_at["20 ms"] == 1024

    with_registry(scenario)


def test_the_same_registration_twice_is_one_engine() -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        engine = peer()
        for _ in range(3):
            await engine.send(register("e1"))
            await engine.receive()
        assert len(events.joined) == 1

    with_registry(scenario)


def test_goodbye_ends_an_engine_at_once() -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        engine = peer()
        await engine.send(register("e1"))
        await engine.send(wire.Goodbye("e1", "asked to end"))
        await until(lambda: len(events.lost) == 1)
        assert "asked to end" in events.lost[0][1]
        assert registry.views()[0].state == "left"
        service = Mock(Service, executor=Mock(refusal=None), recovered=asyncio.Event(), journal=None)
        service.recovered.set()
        assert unready_reason(service, registry) == "no engine is there: engine-0 left"
        other = peer()
        await other.send(register("e2", "engine-1"))
        await until(lambda: len(events.joined) == 2)
        time_out(registry, "engine-1")
        await until(lambda: len(events.lost) == 2)
        reason = unready_reason(service, registry)
        assert reason == "no engine is there: engine-0 left, engine-1 is lost"

    with_registry(scenario)


def test_an_engine_given_up_for_lost_is_invited_to_register_again() -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        engine = peer()
        await engine.send(register("e1"))
        first = await engine.receive()
        time_out(registry, "engine-0")
        await until(lambda: len(events.lost) == 1)
        while True:
            await engine.send(wire.Heartbeat("e1", stats(now_us())))
            again = await engine.receive()
            assert isinstance(first, wire.Ping)
            assert isinstance(again, wire.Ping)
            if again.manager_id != first.manager_id:
                break
        await engine.send(register("e1"))
        await until(lambda: len(events.joined) == 2)

    with_registry(scenario)


JUNK = {
    "nothing": b"",
    "an integer": b"\x00",
    "no msgpack": b"\xc1",
    "text": b"not msgpack",
    "a pickle": b"\x80\x04K\x01.",
    "deep nesting": b"\x91" * 5000,
    "no type": msgspec.msgpack.encode({"epoch": "e1"}),
    "an unknown type": msgspec.msgpack.encode({"type": "Evaluate", "epoch": "e1", "code": "1"}),
    "a type of the other way": wire.encode(wire.Shutdown()),
    "a field of another type": msgspec.msgpack.encode({"type": "Goodbye", "epoch": 1, "reason": "r"}),
    "a field too few": msgspec.msgpack.encode({"type": "Goodbye", "epoch": "e1"}),
    "trailing bytes": wire.encode(wire.Goodbye("e1", "r")) + b"\x00",
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_malformed_frames_are_counted_logged_and_dropped(
    junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        engine = peer()
        await engine.socket.send(junk)
        await engine.socket.send_multipart([b"a", b"b"])
        await until(lambda: registry.num_dropped_frames == 2)
        await engine.send(register("e1"))
        await until(lambda: len(events.joined) == 1)

    with_registry(scenario)
    for number in (1, 2):
        assert sum(f"dropped frame {number} of an engine: " in line for line in caplog.messages) == 1


def test_an_engine_of_another_protocol_or_model_is_refused() -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        old, other = peer(), peer()
        await old.send(register("e1", protocol=999))
        assert isinstance(await old.receive(), wire.Shutdown)
        events.refusal = "another model"
        await other.send(register("e2", "other"))
        assert await other.receive() == wire.Shutdown("another model")
        assert events.joined == []

    with_registry(scenario)


def test_a_send_to_a_vanished_peer_loses_the_engine() -> None:
    async def scenario(registry: EngineRegistry, events: Recorder, peer: Callable[[], Peer]) -> None:
        engine = peer()
        await engine.send(register("e1"))
        await until(lambda: len(events.joined) == 1)
        engine.socket.close(linger=0)

        def is_lost() -> bool:
            registry.send(events.joined[0], wire.Abort(()))
            return len(events.lost) == 1

        await until(is_lost)
        assert "connection is gone" in events.lost[0][1]

    with_registry(scenario)


def test_closing_does_not_wait_for_a_dead_peer_and_unsent_frames() -> None:
    async def run() -> float:
        registry = EngineRegistry(CONFIG)
        events = Recorder()
        registry.start(events)
        context = zmq.asyncio.Context()
        engine = Peer(context, registry.address)
        await engine.send(register("e1"))
        await until(lambda: len(events.joined) == 1)
        for _ in range(2000):
            registry.send(events.joined[0], wire.Abort(tuple(wire.CallId(i) for i in range(2000))))
        started = time.monotonic()
        await registry.close()
        context.destroy(linger=0)
        return time.monotonic() - started

    assert any(asyncio.run(run()) < 2 for _ in range(4))  # others may have the processor for a while


def test_a_taken_port_is_a_typed_error_and_free_ports_are_found_in_parallel() -> None:
    async def run() -> None:
        registries = [EngineRegistry(CONFIG) for _ in range(100)]
        assert len({registry.address for registry in registries}) == 100
        port = int(registries[0].address.rsplit(":", 1)[1])
        with pytest.raises(PortInUse, match=str(port)):
            EngineRegistry(ManagerConfig(engine_port=port))
        await asyncio.gather(*(registry.close() for registry in registries))

    asyncio.run(run())
