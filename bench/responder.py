"""A simulated engine on the real wire: every call takes a set time and answers with the same text.

It runs in a process of its own and has no batch, no cache and no model: what is measured with it is the
manager. For each application it keeps when it replied to the producer and when the consumer's dispatch came.
"""

from __future__ import annotations

import heapq
import os
import secrets
import subprocess
import sys
import time

import msgspec
import zmq

from parrot import wire

CONTEXT_TOKENS = 2**26  # more than any load here needs, so that placement never waits for room
_HEARTBEAT_S = 0.5


class Spec(msgspec.Struct, frozen=True):
    """What the engine says it is, and how it answers: ``text`` of ``ids`` after ``call_s``."""

    address: str
    fingerprint: str
    vocab_size: int
    text: str
    ids: tuple[int, ...]
    name: str = "sim-0"
    call_s: float = 0.05
    max_batch_size: int = 4096


class Counts(msgspec.Struct):
    """Since the last :meth:`Responder.take`: dispatches, hops (producer's reply to consumer's dispatch), and
    the processor time of the process."""

    num_dispatches: int = 0
    hops_ns: list[int] = []
    cpu_s: float = 0.0


class Responder:
    """The process of one simulated engine, as its driver sees it."""

    def __init__(self, spec: Spec) -> None:
        command = [sys.executable, "-m", "bench.responder", msgspec.json.encode(spec).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def take(self) -> Counts:
        """What has been counted since the last time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Counts)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()


class _Engine:
    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._epoch = secrets.token_hex(8)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.connect(spec.address)
        self._due: list[tuple[int, wire.CallId, wire.Dispatch]] = []
        self._replied_ns: dict[int, int] = {}  # by arrival of the application, which is its own
        self._counts = Counts()
        self._num_running = 0
        self._generated = wire.pack_ids(spec.ids)

    def run(self) -> None:
        self._socket.send(wire.encode(self._registration()))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(sys.stdin, zmq.POLLIN)
        heartbeat = 0.0
        while True:
            wait_ms = (self._due[0][0] - time.monotonic_ns()) / 1e6 if self._due else 1000 * _HEARTBEAT_S
            ready = dict(poller.poll(max(0, min(int(wait_ms), int(1000 * _HEARTBEAT_S)))))
            if self._socket in ready:
                self._receive_all()
            if sys.stdin.fileno() in ready and not self._report():
                break
            self._answer_due()
            if time.monotonic() > heartbeat:
                heartbeat = time.monotonic() + _HEARTBEAT_S
                self._socket.send(wire.encode(wire.Heartbeat(self._epoch, self._stats())))
        self._socket.send(wire.encode(wire.Goodbye(self._epoch, "done")))
        zmq.Context.instance().destroy(linger=200)

    def _report(self) -> bool:
        if not os.read(0, 1):
            return False
        self._counts.cpu_s = time.process_time()
        sys.stdout.buffer.write(msgspec.json.encode(self._counts) + b"\n")
        sys.stdout.flush()
        self._counts = Counts()
        return True

    def _receive_all(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            now = time.monotonic_ns()
            message = wire.decode_to_engine(frame)
            if isinstance(message, wire.Dispatch):
                self._start(message, now)

    def _start(self, call: wire.Dispatch, now_ns: int) -> None:
        self._counts.num_dispatches += 1
        replied_ns = self._replied_ns.pop(call.app_arrival_us, None)
        if replied_ns is not None:
            self._counts.hops_ns.append(now_ns - replied_ns)
        self._num_running += 1
        heapq.heappush(self._due, (now_ns + int(self._spec.call_s * 1e9), call.call_id, call))

    def _answer_due(self) -> None:
        now = time.monotonic_ns()
        replies: list[wire.Reply] = []
        apps: list[int] = []
        while self._due and self._due[0][0] <= now:
            _, _, call = heapq.heappop(self._due)
            replies += self._replies(call, now // 1000)
            apps.append(call.app_arrival_us)
        if not replies:
            return
        self._num_running -= len(apps)
        frame = wire.encode(wire.StepReplies(self._epoch, tuple(replies), self._stats()))
        sent_ns = time.monotonic_ns()
        self._replied_ns.update(dict.fromkeys(apps, sent_ns))
        self._socket.send(frame)

    def _replies(self, call: wire.Dispatch, now_us: int) -> list[wire.Reply]:
        replies: list[wire.Reply] = []
        num_tokens, context_id = 0, wire.ContextId(0)
        begun_us = now_us - int(self._spec.call_s * 1e6)
        timing = wire.Timing(begun_us, begun_us, now_us, now_us)
        for verb, message in enumerate(call.verbs):
            context_id = message.context_id
            if isinstance(message, wire.Fill):
                num_ids = len(message.token_ids) // 4
                num_tokens += num_ids
                replies.append(wire.FillDone(call.call_id, verb, num_ids, 0))
            elif isinstance(message, wire.Generate):
                num_ids = len(self._spec.ids)
                num_tokens += num_ids
                if call.stream:
                    replies.append(wire.Chunk(call.call_id, verb, self._spec.text))
                replies.append(
                    wire.GenerateDone(
                        call.call_id, verb, self._spec.text, self._generated, num_ids, "stop", timing
                    )
                )
        return [*replies, wire.CallDone(call.call_id, context_id, num_tokens)]

    def _registration(self) -> wire.Register:
        spec = self._spec
        model = wire.ModelInfo("sim", spec.fingerprint, spec.vocab_size, 2**20, "none", "sim")
        cost = wire.CostModel(1000.0, 1.0, 1.0, 0.001, CONTEXT_TOKENS, CONTEXT_TOKENS // 16)
        return wire.Register(
            wire.PROTOCOL_VERSION, spec.name, self._epoch, os.getpid(), model, cost, spec.max_batch_size
        )

    def _stats(self) -> wire.EngineStats:
        rest = [0] * (len(wire.EngineStats.__struct_fields__) - 1)
        rest[wire.EngineStats.__struct_fields__.index("num_running") - 1] = self._num_running
        return wire.EngineStats(time.monotonic_ns() // 1000, *rest)


if __name__ == "__main__":
    _Engine(msgspec.json.decode(sys.argv[1], type=Spec)).run()
