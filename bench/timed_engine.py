"""A simulated engine that times the manager: from the reply of a producer to the dispatch of its consumer.

It is ``parrot engine --simulate`` with a clock at its end of the wire. Each line on its standard input is
answered with a line of JSON, what it has counted since the last one; the end of the input ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from parrot import wire
from parrot.config import EngineConfig
from parrot.engine import server
from parrot.engine.link import Link

NUM_BLOCKS = 2**20  # of 16 tokens: more than any load here needs, so that nothing waits for room
STEP_S = 0.01
MAX_BATCH = 4096


class Spec(msgspec.Struct, frozen=True):
    """One engine: every step takes ``step_s``, whatever is in it."""

    address: str
    model: str
    name: str = "sim-0"
    step_s: float = STEP_S


class Counts(msgspec.Struct):
    """``hops_ns``: from a producer's reply given to the link to its consumer's dispatch coming out of it, if
    that goes to the same engine; ``cpu_s``: processor time of the process so far."""

    num_dispatches: int = 0
    hops_ns: list[int] = []
    cpu_s: float = 0.0


class TimedEngine:
    """The process, as its driver sees it."""

    def __init__(self, spec: Spec) -> None:
        command = [sys.executable, "-m", "bench.timed_engine", msgspec.json.encode(spec).decode()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

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
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def take_all(engines: Sequence[TimedEngine]) -> Counts:
    """What all of them have counted since the last time."""
    each = [engine.take() for engine in engines]
    return Counts(
        sum(counts.num_dispatches for counts in each),
        [hop for counts in each for hop in counts.hops_ns],
        sum(counts.cpu_s for counts in each),
    )


class _TimedLink(Link):
    """Applications are told apart by their times of arrival; of a chain, one call is there at a time."""

    counts = Counts()
    lock = threading.Lock()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._arrival_of: dict[wire.CallId, int] = {}
        self._replied_ns: dict[int, int] = {}

    def send(self, message: wire.FromEngine) -> None:
        """See :class:`~parrot.engine.link.Link`."""
        if isinstance(message, wire.StepReplies):
            now = time.monotonic_ns()
            for reply in message.replies:
                if isinstance(reply, wire.GenerateDone):
                    self._replied_ns[self._arrival_of.pop(reply.call_id)] = now
        super().send(message)

    def _receive(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Dispatch):
            now = time.monotonic_ns()
            self._arrival_of[message.call_id] = message.app_arrival_us
            replied = self._replied_ns.pop(message.app_arrival_us, None)
            with self.lock:
                self.counts.num_dispatches += 1
                if replied is not None:
                    self.counts.hops_ns.append(now - replied)
        super()._receive(message)

    @classmethod
    def report(cls) -> None:
        """Answer the driver until it is gone."""
        for _ in sys.stdin:
            with cls.lock:
                counts, cls.counts = cls.counts, Counts()
            counts.cpu_s = time.process_time()
            print(msgspec.json.encode(counts).decode(), flush=True)


def _main(spec: Spec) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cost = Path(directory) / "cost.json"
        model = wire.CostModel(spec.step_s * 1e6, 0.0, 0.0, 0.0, 16 * NUM_BLOCKS, NUM_BLOCKS)
        cost.write_bytes(msgspec.json.encode(model))
        threading.Thread(target=_report_and_end, daemon=True).start()
        config = EngineConfig(
            manager_address=spec.address,
            model=spec.model,
            name=spec.name,
            simulate=cost,
            max_batch_size=MAX_BATCH,
            max_batch_tokens=65536,
            drain_grace_s=0.0,
        )
        server.run_engine(config, link_type=_TimedLink)


def _report_and_end() -> None:
    _TimedLink.report()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _main(msgspec.json.decode(sys.argv[1], type=Spec))
