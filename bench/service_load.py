"""What the benchmarks of the service have in common: a manager process with simulated engines, a lean HTTP
client, and the bodies that they send."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parrot.config import DEFAULT_MODEL

from .timed_engine import STEP_S, Spec, TimedEngine

START_TIMEOUT_S = 60.0
TEMPLATE_BYTES, VALUE_BYTES = 2048, 200
_WORDS = (
    "the service keeps what several calls have in common and hands each of them only the part that is its "
    "own so that nothing is computed twice while every answer stays what it would have been alone "
)
CALL_TOKENS = 5
SHORT: dict[str, Any] = {"max_tokens": CALL_TOKENS, "ignore_eos": True}  # exactly so many steps
_SAMPLING: dict[str, Any] = {"max_tokens": 32}  # up to so many, 16 on average


def filler(num_chars: int, seed: int = 0) -> str:
    """English text of an exact length, another for each seed."""
    text = f"Case {seed}: " + _WORDS * (num_chars // len(_WORDS) + 1)
    return text[:num_chars]


TEMPLATE = filler(TEMPLATE_BYTES - 64) + "\nInput: {{input:value}}\nSo far: {{input:before}}\n{{output:out}}"


class ManagerProcess:
    """A running ``parrot manager``; ``cpu_s`` and ``memory_bytes`` are those of its process."""

    def __init__(self, process: subprocess.Popen[bytes], ready_file: Path, log_file: Path) -> None:
        self._process = process
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the manager did not start: {log_file.read_text()[-2000:]}")
            time.sleep(0.02)
        ready = json.loads(ready_file.read_text())
        self.pid: int = ready["pid"]
        self.engine_address: str = ready["local_engine_address"]
        self.port = int(ready["url"].rsplit(":", 1)[1])

    @property
    def cpu_s(self) -> float:
        """Processor time of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_bytes(self) -> int:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def manager_process(*options: str) -> Iterator[ManagerProcess]:
    """A manager on free ports, without engines."""
    with service_process("manager", "--model", DEFAULT_MODEL, "--engine-port", "0", *options) as manager:
        yield manager


@contextmanager
def service_process(command: str, *options: str) -> Iterator[ManagerProcess]:
    """A ``parrot manager`` or ``parrot serve`` on a free port, once its API is there."""
    with tempfile.TemporaryDirectory() as directory:
        ready_file, log_file = Path(directory) / "ready.json", Path(directory) / "log"
        arguments = [sys.executable, "-m", "parrot.cli.main", command, "--port", "0", *options]
        arguments += ["--ready-file", str(ready_file), "--drain-grace-s", "0"]
        with log_file.open("wb") as log:
            process = subprocess.Popen(arguments, stderr=log)
        try:
            yield ManagerProcess(process, ready_file, log_file)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def simulated_service(
    num_engines: int = 1, *, step_s: float = STEP_S, options: tuple[str, ...] = ()
) -> Iterator[tuple[ManagerProcess, list[TimedEngine]]]:
    """A manager with engines whose steps take ``step_s``; a call takes one for each token of its output."""
    with manager_process(*options) as manager:
        engines = [
            TimedEngine(Spec(manager.engine_address, DEFAULT_MODEL, f"sim-{index}", step_s))
            for index in range(num_engines)
        ]
        try:
            asyncio.run(until_ready(manager.port, num_engines))
            yield manager, engines
        finally:
            for engine in engines:
                engine.close()


async def until_ready(port: int, num_engines: int) -> None:
    """Wait for so many engines; RuntimeError if they do not join."""
    client = await HttpClient.connect(port)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        status, body = await client.request("GET", "/ready")
        if status == 200 and json.loads(body)["engines"] == num_engines:
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engines did not join: {body!r}")
        await asyncio.sleep(0.05)
    client.close()


class HttpClient:
    """One kept-alive connection; answers must carry a Content-Length."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> HttpClient:
        """Connect to the service on this machine."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**26))

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer."""
        head = f"{method} {path} HTTP/1.1\r\nHost: parrot\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self._writer.drain()
        return await self._answer()

    async def post(self, path: str, body: object) -> Any:
        """What the service answers to ``body``; raises for an error."""
        status, answer = await self.request("POST", path, json.dumps(body).encode())
        if status >= 300:
            raise RuntimeError(f"{path}: {status} {answer[:500]!r}")
        return json.loads(answer) if answer else None

    async def _answer(self) -> tuple[int, bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(head.split(" ", 2)[1])
        length = next(
            (line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length")), "0"
        )
        return status, await self._reader.readexactly(int(length))

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


def new_session_id() -> str:
    """A random id, as clients make them."""
    return f"s-{os.urandom(16).hex()}"


def call_body(
    index: int, before: str | None, *, template: str = TEMPLATE, sampling: dict[str, Any] = _SAMPLING
) -> dict[str, Any]:
    """A call with the template that all share, a value of 200 bytes, and the output of an earlier call."""
    value = filler(VALUE_BYTES, index)
    last: dict[str, Any] = {"name": "before", "kind": "input"}
    last |= {"value": "nothing"} if before is None else {"semantic_var_id": before}
    return {
        "function": "step",
        "request_id": f"r-{index}",
        "prompt": template,
        "placeholders": [
            {"name": "value", "kind": "input", "value": value},
            last,
            {"name": "out", "kind": "output", "semantic_var_id": f"v-{index}", "sampling": sampling},
        ],
    }


def chain_body(session_id: str, num_calls: int, *, sampling: dict[str, Any] = _SAMPLING) -> dict[str, Any]:
    """A session whose calls each read the output of the one before; the last is asked for."""
    before = [None, *(f"v-{index}" for index in range(num_calls - 1))]
    calls = [call_body(index, var_id, sampling=sampling) for index, var_id in enumerate(before)]
    label = {"semantic_var_id": f"v-{num_calls - 1}", "criteria": "LATENCY"}
    return {"session_id": session_id, "create_session": True, "calls": calls, "labels": [label]}


def batch_body(session_id: str, num_calls: int, *, sampling: dict[str, Any] = _SAMPLING) -> dict[str, Any]:
    """A session of calls that do not depend on each other."""
    calls = [call_body(index, None, sampling=sampling) for index in range(num_calls)]
    return {"session_id": session_id, "create_session": True, "calls": calls}
