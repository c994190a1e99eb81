"""The engine's end of the wire in this process: heartbeats in long steps, dead peers, timeouts."""

from __future__ import annotations

import logging
import queue
import signal
import socket as sockets
import time
from collections.abc import Iterator

import pytest
import zmq

from parrot import wire
from parrot.config import EngineConfig
from parrot.engine import server
from parrot.engine.link import EXIT_MANAGER_SILENT, Drain, Link, LinkConfig, ManagerChanged, Stop
from parrot.errors import ConfigError

COST = wire.CostModel(1.0, 1.0, 1.0, 1.0, 160, 10)
MODEL = wire.ModelInfo("tiny", "f", 100, 2048, "float32", "cpu")
REGISTER = wire.Register(wire.PROTOCOL_VERSION, "e0", "epoch", 1, MODEL, COST, 8)
STATS = wire.EngineStats(*[0] * len(wire.EngineStats.__struct_fields__))


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.set_hwm(0)  # a ROUTER drops what exceeds it, as soon as a busy machine lets frames pile up
    router.bind("tcp://127.0.0.1:*")
    yield router
    context.destroy(linger=0)


def link_to(address: str, manager_timeout_s: float = 600.0, parent_pid: int | None = None) -> Link:
    link = Link(LinkConfig(address, 0.05, manager_timeout_s, parent_pid), REGISTER, STATS)
    link.start()
    return link


def receive(router: zmq.Socket[bytes]) -> tuple[bytes, wire.FromEngine]:
    assert router.poll(60_000), "no message in 60 s"
    identity, frame = router.recv_multipart()
    return identity, wire.decode_from_engine(frame)


def ping(router: zmq.Socket[bytes], identity: bytes, manager_id: str = "m1") -> None:
    router.send_multipart([identity, wire.encode(wire.Ping(manager_id))])


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a b", "x" * 129, "\udcff", "ä"])
def test_a_name_that_cannot_stand_in_a_log_is_refused_before_anything_is_loaded(name: str) -> None:
    with pytest.raises(ConfigError, match=r"name = .* is not 1 to 128 visible ASCII characters"):
        EngineConfig(manager_address="tcp://127.0.0.1:1", name=name)


def test_heartbeats_go_on_while_the_loop_is_busy(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT))
    identity, first = receive(router)
    assert first == REGISTER
    ping(router, identity)
    beats: list[wire.Heartbeat] = []
    while len(beats) < 4:  # the loop, this thread, calls nothing on the link meanwhile
        message = receive(router)[1]
        beats += [message] if isinstance(message, wire.Heartbeat) else []
    assert beats[0].stats.clock_us < beats[-1].stats.clock_us
    link.close("done")


def test_frames_reach_the_loop_in_order_and_bad_ones_are_counted(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT))
    identity, _ = receive(router)
    ping(router, identity)
    abort = wire.Abort((wire.CallId(4),))
    router.send_multipart([identity, wire.encode(abort)])
    router.send_multipart([identity, b"\xc1"])
    router.send_multipart([identity, wire.encode(abort), b"", wire.encode(abort)])
    ping(router, identity, "m2")
    router.send_multipart([identity, wire.encode(wire.Shutdown())])
    *events, stop = [link.events.get(timeout=60) for _ in range(6)]
    assert events == [ManagerChanged("m1"), abort, abort, abort, ManagerChanged("m2")]
    assert isinstance(stop, Stop)
    assert stop.exit_code == 0
    assert link.num_dropped == 2
    link.close("done")


def test_an_engine_that_is_refused_says_why_and_fails(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT))
    identity, _ = receive(router)
    router.send_multipart([identity, wire.encode(wire.Shutdown("its model is another"))])
    stop = link.events.get(timeout=60)
    assert stop == Stop("the manager refuses it: its model is another", 4)
    link.close("done")


def test_the_processor_is_given_away_as_soon_as_a_reply_has_left_and_the_link_receives_meanwhile(
    router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT))
    identity, _ = receive(router)
    ping(router, identity)
    assert link.events.get(timeout=60) == ManagerChanged("m1")
    replies, abort = wire.StepReplies("epoch", (), STATS, "m1", 1), wire.Abort((wire.CallId(4),))
    seen: list[object] = []

    def answered() -> None:
        while receive(router)[1] != replies:
            pass
        router.send_multipart([identity, wire.encode(abort)])
        seen.append(link.events.get(timeout=20))

    def look(_: Link) -> bool:
        seen.append("looked for arrivals")
        return False

    with monkeypatch.context() as patch:
        patch.setattr("os.sched_yield", answered)
        patch.setattr(Link, "_has_arrived", look)
        link.send(replies)
    assert seen == [abort, "looked for arrivals"]
    link.close("done")


def test_goodbye_follows_what_was_sent_before_it(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT))
    replies = [wire.StepReplies("epoch", (wire.Chunk(wire.CallId(i), 1, "x"),), STATS) for i in range(50)]
    for reply in replies:
        link.send(reply)
    link.close("why not")
    got: list[wire.FromEngine] = []
    while not got or not isinstance(got[-1], wire.Goodbye):
        got.append(receive(router)[1])
    assert [message for message in got[:-1] if not isinstance(message, wire.Register)] == replies


def test_the_loop_sends_while_the_thread_receives_and_nothing_is_lost(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT))
    identity, _ = receive(router)
    ping(router, identity)
    count = 2000
    sent = 0
    numbers: list[int] = []
    while len(numbers) < count:
        if sent < count:
            router.send_multipart([identity, wire.encode(wire.Abort((wire.CallId(sent),)))])
            link.send(wire.StepReplies("epoch", (), STATS, "m1", sent + 1))
            sent += 1
        while router.poll(0 if sent < count else 5000):
            message = receive(router)[1]
            if isinstance(message, wire.StepReplies):
                numbers.append(message.sequence)
                if len(numbers) == count:
                    break
    assert numbers == list(range(1, count + 1))
    assert link.events.get(timeout=60) == ManagerChanged("m1")
    aborts = [link.events.get(timeout=60) for _ in range(count)]
    assert aborts == [wire.Abort((wire.CallId(number),)) for number in range(count)]
    link.close("done")


def test_frames_that_the_manager_misses_are_sent_again_as_they_were(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT))
    identity, _ = receive(router)
    ping(router, identity)
    replies = [wire.StepReplies("epoch", (), STATS, "m1", number) for number in range(1, 6)]
    for reply in replies:
        link.send(reply)
    for missing in (3, 0):  # it never had a frame 0
        router.send_multipart([identity, wire.encode(wire.Resend(missing))])
    link_is_through = wire.Abort((wire.CallId(1),))
    router.send_multipart([identity, wire.encode(link_is_through)])
    assert link.events.get(timeout=60) == ManagerChanged("m1")
    assert link.events.get(timeout=60) == link_is_through
    link.send(wire.Goodbye("epoch", "that was all"))
    got: list[wire.FromEngine] = []
    while not got or not isinstance(got[-1], wire.Goodbye):
        got.append(receive(router)[1])
    assert [one for one in got if isinstance(one, wire.StepReplies)] == [*replies, *replies[2:]]
    link.close("done")


def test_a_reply_does_not_wait_for_the_thread(router: zmq.Socket[bytes]) -> None:
    link = Link(LinkConfig(router.getsockopt_string(zmq.LAST_ENDPOINT), 0.05, 30.0), REGISTER, STATS)
    reply = wire.StepReplies("epoch", (), STATS, "m1", 1)
    link.send(reply)  # before the thread is started
    assert receive(router)[1] == reply
    link.start()
    link.close("done")


def test_closing_does_not_wait_for_a_peer() -> None:
    with sockets.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    link = link_to(f"tcp://127.0.0.1:{port}")
    link.send(wire.StepReplies("epoch", (), STATS))
    started = time.monotonic()
    link.close("nobody is there")
    assert time.monotonic() - started < 30  # for ever otherwise


def next_beat(router: zmq.Socket[bytes]) -> wire.Heartbeat:
    while not isinstance(message := receive(router)[1], wire.Heartbeat):
        pass
    return message


def test_heartbeats_say_what_steps_have_come_to_take(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT))
    identity, _ = receive(router)
    ping(router, identity)
    assert next_beat(router).cost is None
    link.publish(STATS, wire.StepCost(1.0, 2.0, 3.0, 4.0))
    while (cost := next_beat(router).cost) is None:
        pass
    assert cost == wire.StepCost(1.0, 2.0, 3.0, 4.0)
    link.close("done")


def test_frames_of_the_manager_are_counted_from_the_moment_of_joining(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT))
    identity, _ = receive(router)
    ping(router, identity)
    assert link.events.get(timeout=60) == ManagerChanged("m1")
    abort = wire.encode(wire.Abort(()))
    for _ in range(2):
        router.send_multipart([identity, abort])
    link.send(wire.StepReplies("epoch", (), STATS, "m1", 7))
    router.send_multipart([identity, wire.encode(wire.Ping("m1", num_frames=2))])
    while (beat := next_beat(router)).sequence != 7:
        pass
    assert beat.num_missing == 0
    router.send_multipart([identity, wire.encode(wire.Ping("m1", num_frames=5))])
    while (beat := next_beat(router)).num_missing == 0:
        pass
    assert beat.num_missing == 3
    ping(router, identity, "m2")
    while not isinstance(message := receive(router)[1], wire.Register):
        pass
    assert message.sequence == 7
    assert next_beat(router).num_missing == 0
    link.close("done")


def test_heartbeats_say_how_long_the_present_turn_has_lasted(
    router: zmq.Socket[bytes], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    link = Link(LinkConfig(address, 0.05, 30.0, stall_after_s=0.3), REGISTER, STATS)
    link.start()
    identity, _ = receive(router)
    ping(router, identity)
    assert next_beat(router).stats.turn_us == 0
    link.begin_turn()
    while next_beat(router).stats.turn_us < 800_000:
        pass
    assert sum("present turn has lasted" in record.message for record in caplog.records) == 1
    stacks = capfd.readouterr().err
    assert "test_heartbeats_say_how_long" in stacks  # where the loop, this thread, stands
    link.begin_turn(waits=True)
    while next_beat(router).stats.turn_us > 0:
        pass
    link.close("done")


def test_a_drain_is_asked_for_once_and_the_second_time_it_is_a_stop(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT))
    link.drain("SIGTERM")
    assert link.events.get(timeout=60) == Drain("SIGTERM")
    link.drain("SIGTERM")
    assert isinstance(link.events.get(timeout=60), Stop)
    link.close("done")


def test_a_manager_that_comes_during_a_drain_is_told_of_it(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT))
    identity, _ = receive(router)
    ping(router, identity)
    link.drain("SIGTERM")
    ping(router, identity, "m2")
    kinds = []
    while wire.Draining not in kinds:
        kinds.append(type(receive(router)[1]))
    assert kinds[kinds.index(wire.Draining) - 1] is wire.Register
    link.close("done")


def test_a_drain_that_takes_longer_than_its_grace_is_a_stop(router: zmq.Socket[bytes]) -> None:
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    link = Link(LinkConfig(address, 0.05, 30.0, drain_grace_s=0.2), REGISTER, STATS)
    link.start()
    link.drain("SIGTERM")
    assert isinstance(link.events.get(timeout=60), Drain)
    stop = link.events.get(timeout=60)
    assert isinstance(stop, Stop)
    assert "0.2 s" in stop.reason
    link.close("done")


def test_an_engine_waits_a_minute_for_its_manager_unless_told_otherwise() -> None:
    address = "tcp://127.0.0.1:9"
    link = Link(LinkConfig(address, 1.0, EngineConfig(address).manager_timeout_s), REGISTER, STATS)
    link._last_ping = time.monotonic() - 50
    link._watch_manager()
    assert link.events.empty()
    link._last_ping = time.monotonic() - 60.1
    link._watch_manager()
    stop = link.events.get_nowait()
    assert isinstance(stop, Stop)
    assert stop.exit_code == EXIT_MANAGER_SILENT
    link._context.destroy(linger=0)


def test_a_silent_manager_stops_the_loop_once(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT), manager_timeout_s=0.2)
    stop = link.events.get(timeout=60)
    assert isinstance(stop, Stop)
    assert stop.exit_code == 3
    with pytest.raises(queue.Empty):
        link.events.get(timeout=0.6)
    link.close("silence")


def test_a_parent_that_changed_stops_the_loop(router: zmq.Socket[bytes]) -> None:
    link = link_to(router.getsockopt_string(zmq.LAST_ENDPOINT), parent_pid=2**22)
    assert isinstance(link.events.get(timeout=60), Stop)
    link.close("orphan")


def test_an_address_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="manager_address = 'nowhere'"):
        link_to("nowhere")


def test_an_engine_that_hears_no_manager_ends_with_a_warning(
    router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Idle:
        def stats(self) -> wire.EngineStats:
            return STATS

    def wait_for_the_end(_: object, link: Link, *__: object) -> Stop:
        while not isinstance(event := link.events.get(timeout=60), Stop):
            pass
        return event

    monkeypatch.setattr(server, "load_engine", lambda _: (Idle(), REGISTER))
    monkeypatch.setattr(server, "_serve", wait_for_the_end)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit) as ended:
        server.run_engine(EngineConfig(address, name="lonely", heartbeat_s=0.1, manager_timeout_s=1))
    assert ended.value.code == 3
    assert "engine lonely ends: no word from the manager" in caplog.text
