"""A real engine process behind a real ROUTER socket: its life, its replies, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from parrot import wire
from parrot.dummy_model import write_dummy_model
from parrot.engine.cost_file import read_cost, write_cost
from parrot.wire import CallId, ContextId, Dispatch, Fill, Generate, Sampling, pack_ids

pytestmark = pytest.mark.system

START_S = 180.0
ENGINE = """
import sys
from parrot.config import EngineConfig
from parrot.engine.server import run_engine
run_engine(EngineConfig(**eval(sys.argv[1], {})))
"""
PARENT = """
import os, subprocess, sys, time
options = repr({**eval(sys.argv[2], {}), "parent_pid": os.getpid()})
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], options])
print(child.pid, flush=True)
time.sleep(600)
"""


class Manager:
    """The other end of the wire: one ROUTER and the engine that registered last."""

    def __init__(self, address: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.identity = b""
        self.next_id = 1

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, timeout_s: float = 60.0) -> wire.FromEngine:
        if not self._socket.poll(int(timeout_s * 1000)):
            raise TimeoutError(f"no message in {timeout_s} s")
        self.identity, frame = self._socket.recv_multipart()
        return wire.decode_from_engine(frame)

    def wait_for(self, kind: type[wire.FromEngine], timeout_s: float = 60.0) -> wire.FromEngine:
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.receive(max(0.0, deadline - time.monotonic()))
            if isinstance(message, kind):
                return message

    def send_frame(self, *frames: bytes) -> None:
        self._socket.send_multipart([self.identity, *frames])

    def send(self, message: wire.ToEngine) -> None:
        self.send_frame(wire.encode(message))

    def accept(self, manager_id: str = "m1") -> wire.Register:
        register = self.wait_for(wire.Register, START_S)
        assert isinstance(register, wire.Register)
        self.send(wire.Ping(manager_id))
        return register

    def dispatch(self, prompt: list[int], max_tokens: int = 5, **options: bool) -> int:
        call_id = self.next_id
        self.next_id += 1
        context_id = ContextId(call_id)
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        verbs = (Fill(pack_ids(prompt), context_id), Generate(sampling, context_id))
        self.send(Dispatch(CallId(call_id), 1, 0, "LATENCY", verbs, **options))
        return call_id

    def replies_of(self, call_id: int, timeout_s: float = 60.0) -> list[wire.Reply]:
        """All replies of a call, up to its end."""
        found: list[wire.Reply] = []
        while True:
            message = self.wait_for(wire.StepReplies, timeout_s)
            assert isinstance(message, wire.StepReplies)
            found += [r for r in message.replies if getattr(r, "call_id", None) == call_id]
            if found and isinstance(found[-1], wire.CallDone | wire.CallFailed):
                return found


def environment() -> dict[str, str]:
    source = str(Path(wire.__file__).parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def arguments(manager: Manager, model: Path, **options: object) -> str:
    return repr(
        {
            "manager_address": manager.address,
            "model": str(model),
            "num_blocks": 128,
            "num_threads": 1,
            "heartbeat_s": 0.1,
            **options,
        }
    )


def is_alive(pid: int) -> bool:
    """It runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


StartEngine = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def manager() -> Iterator[Manager]:
    manager = Manager()
    yield manager
    manager.close()


@pytest.fixture
def start(manager: Manager, tiny_model: Path) -> Iterator[StartEngine]:
    processes: list[subprocess.Popen[bytes]] = []

    def start_engine(**options: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", ENGINE, arguments(manager, tiny_model, **options)]
        processes.append(subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE))
        return processes[-1]

    yield start_engine
    for process in processes:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_it_registers_until_it_is_heard_serves_and_says_goodbye(manager: Manager, start: StartEngine) -> None:
    process = start(name="e7")
    manager.wait_for(wire.Register, START_S)
    register = manager.accept()
    assert (register.name, register.pid) == ("e7", process.pid)
    assert register.protocol_version == wire.PROTOCOL_VERSION
    assert register.cost_model.num_blocks == 128
    assert register.cost_model.capacity_tokens == 128 * 16
    assert register.cost_model.base_us + register.cost_model.per_sequence_us > 0
    replies = manager.replies_of(manager.dispatch([5, 6, 7, 8], stream=True))
    kinds = [type(reply) for reply in replies]
    assert kinds[0] is wire.FillDone
    assert kinds[-2:] == [wire.GenerateDone, wire.CallDone]
    done = replies[-2]
    assert isinstance(done, wire.GenerateDone)
    assert done.num_generated == 5
    assert "".join(r.text for r in replies if isinstance(r, wire.Chunk)) == done.text
    heartbeat = manager.wait_for(wire.Heartbeat)
    assert isinstance(heartbeat, wire.Heartbeat)
    assert heartbeat.stats.decode_tokens == 4
    assert heartbeat.stats.num_held_blocks == 0

    process.send_signal(signal.SIGTERM)
    goodbye = manager.wait_for(wire.Goodbye)
    assert isinstance(goodbye, wire.Goodbye)
    assert goodbye.epoch == register.epoch
    assert process.wait(timeout=120) == 0


@pytest.fixture(scope="module")
def running(tiny_model: Path) -> Iterator[Manager]:
    """An engine that several tests use, seen from its manager."""
    manager = Manager()
    command = [sys.executable, "-c", ENGINE, arguments(manager, tiny_model)]
    with subprocess.Popen(command, env=environment()) as process:
        manager.accept()
        yield manager
        process.kill()
    manager.close()


def test_bad_frames_are_counted_and_dropped_and_work_goes_on(running: Manager) -> None:
    manager = running
    good = wire.encode(wire.Ping("m1"))
    for frames in ([b"\xff\x00garbage"], [b""], [good, good[:-3]], [b"\x80\x04N."]):
        manager.send_frame(*frames)
    bad_ids = Dispatch(CallId(900), 1, 0, "LATENCY", (Fill(b"odd", ContextId(900)),))
    manager.send(bad_ids)
    assert isinstance(manager.replies_of(900)[-1], wire.CallFailed)
    assert isinstance(manager.replies_of(manager.dispatch([5, 6, 7]))[-1], wire.CallDone)
    while (beat := manager.wait_for(wire.Heartbeat)).stats.dropped_messages < 4:  # type: ignore[union-attr]
        pass
    assert beat.stats.dropped_messages == 4  # type: ignore[union-attr]


def test_abort_over_the_wire_stops_a_call_and_returns_its_blocks(running: Manager) -> None:
    manager = running
    call_id = manager.dispatch([5, 6, 7], max_tokens=2000)
    while manager.wait_for(wire.Heartbeat).stats.num_running == 0:  # type: ignore[union-attr]
        pass
    manager.send(wire.Abort((CallId(call_id),)))
    while (beat := manager.wait_for(wire.Heartbeat)).stats.num_running:  # type: ignore[union-attr]
        pass
    assert beat.stats.num_held_blocks == 0  # type: ignore[union-attr]
    assert isinstance(manager.replies_of(manager.dispatch([5, 6, 7]))[-1], wire.CallDone)


def test_a_new_manager_gets_a_registration_and_an_engine_without_calls(running: Manager) -> None:
    manager = running
    call_id = manager.dispatch([5, 6, 7], max_tokens=2000)
    while manager.wait_for(wire.Heartbeat).stats.num_running == 0:  # type: ignore[union-attr]
        pass
    manager.send(wire.Ping("m2"))
    manager.wait_for(wire.Register)
    while manager.wait_for(wire.Heartbeat).stats.num_running:  # type: ignore[union-attr]
        pass
    manager.next_id = call_id  # the new manager may count from anywhere
    assert isinstance(manager.replies_of(manager.dispatch([5, 6, 7]))[-1], wire.CallDone)


def test_it_finds_a_manager_that_comes_back_on_the_same_port(manager: Manager, start: StartEngine) -> None:
    start()
    manager.accept("m1")
    manager.wait_for(wire.Heartbeat)
    manager.close()
    successor = Manager(manager.address)
    try:
        successor.wait_for(wire.Heartbeat)
        successor.send(wire.Ping("m2"))
        successor.wait_for(wire.Register)
        assert isinstance(successor.replies_of(successor.dispatch([5, 6, 7]))[-1], wire.CallDone)
    finally:
        successor.close()


def test_it_ends_when_the_manager_is_silent(manager: Manager, start: StartEngine) -> None:
    process = start(manager_timeout_s=1.0)
    manager.accept()
    assert process.wait(timeout=120) == 3


def test_it_ends_in_time_when_the_manager_is_gone(manager: Manager, start: StartEngine) -> None:
    process = start(manager_timeout_s=1.0)
    manager.accept()
    manager.close()
    assert process.wait(timeout=120) == 3


def test_shutdown_ends_it_in_the_middle_of_a_call(manager: Manager, start: StartEngine) -> None:
    process = start()
    manager.accept()
    manager.dispatch([5, 6, 7], max_tokens=2000)
    manager.wait_for(wire.StepReplies)
    manager.send(wire.Shutdown())
    manager.wait_for(wire.Goodbye)
    assert process.wait(timeout=120) == 0


def test_sigterm_lets_it_finish_what_it_has_and_a_second_one_does_not(
    manager: Manager, start: StartEngine
) -> None:
    process = start()
    manager.accept()
    call_id = manager.dispatch([5, 6, 7], max_tokens=300)
    manager.wait_for(wire.StepReplies)
    process.send_signal(signal.SIGTERM)
    assert isinstance(manager.wait_for(wire.Draining), wire.Draining)
    assert isinstance(manager.replies_of(call_id)[-1], wire.CallDone)
    manager.wait_for(wire.Goodbye)
    assert process.wait(timeout=120) == 0

    impatient = start()
    manager.accept()
    manager.dispatch([5, 6, 7], max_tokens=2000)
    manager.wait_for(wire.StepReplies)
    impatient.send_signal(signal.SIGTERM)
    manager.wait_for(wire.Draining)
    impatient.send_signal(signal.SIGTERM)
    manager.wait_for(wire.Goodbye)
    assert impatient.wait(timeout=120) == 0


def test_it_does_not_outlive_a_parent_that_is_killed(manager: Manager, tiny_model: Path) -> None:
    options = arguments(manager, tiny_model)
    command = [sys.executable, "-c", PARENT, ENGINE, options]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        manager.accept()
        manager.wait_for(wire.Heartbeat)
        parent.kill()
    manager.wait_for(wire.Goodbye)
    deadline = time.monotonic() + 60
    while is_alive(engine_pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(engine_pid)


def test_a_killed_engine_is_replaced_under_a_new_epoch(manager: Manager, start: StartEngine) -> None:
    process = start(name="e0")
    first = manager.accept()
    process.kill()
    process.wait()
    start(name="e0")
    while (second := manager.accept()).epoch == first.epoch:
        pass
    assert second.name == first.name
    assert isinstance(manager.replies_of(manager.dispatch([5, 6, 7]))[-1], wire.CallDone)


def test_a_simulated_engine_answers_in_the_time_of_its_cost_model(manager: Manager, tmp_path: Path) -> None:
    cost = wire.CostModel(20_000, 10, 20, 0.5, 4096, 256)
    write_cost(tmp_path / "cost.json", cost, "made up")
    command = [sys.executable, "-m", "parrot.cli.main", "engine", "--manager", manager.address]
    model = write_dummy_model(tmp_path / "model", "tiny")  # which has no weights
    command += ["--model", str(model), "--simulate", str(tmp_path / "cost.json")]
    command += ["--write-cost", str(tmp_path / "again.json")]
    process = subprocess.Popen(command, env=environment())
    try:
        register = manager.accept()
        assert (register.cost_model, register.model.device) == (cost, "simulated")
        assert read_cost(tmp_path / "again.json") == cost
        call_id = manager.dispatch(list(range(100, 150)), max_tokens=10)
        done = next(r for r in manager.replies_of(call_id) if isinstance(r, wire.GenerateDone))
        assert (done.num_generated, done.finish_reason) == (10, "length")
        assert 200_000 <= done.timing.finished_us - done.timing.received_us < 60_000_000
    finally:
        process.kill()
        process.wait()
