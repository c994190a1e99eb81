"""A real service for system tests: `parrot serve` as a child process, and clients for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 180.0


class ServiceProcess:
    """A running service; ``url`` and ``pid`` are those of its manager."""

    def __init__(self, process: subprocess.Popen[bytes], ready_file: Path, log_file: Path) -> None:
        self.process = process
        self.log_file = log_file
        ready = wait_for(lambda: self._announced(ready_file), START_TIMEOUT_S)
        self.url: str = ready["url"]
        self.engine_address: str = ready["engine_address"]
        self.pid: int = ready["pid"]
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def _announced(self, ready_file: Path) -> dict[str, Any] | None:
        assert self.process.poll() is None, self.log_file.read_text()
        return json.loads(ready_file.read_text()) if ready_file.exists() else None

    def wait_ready(self) -> None:
        wait_for(self._is_ready, START_TIMEOUT_S)

    def _is_ready(self) -> bool:
        reply = self.http.get("/ready")
        assert "does not come up" not in reply.text, reply.text
        return reply.status_code == 200

    def session(self) -> str:
        return str(self.http.post("/v1/session").json()["session_id"])

    def submit(self, session: str, *calls: dict[str, Any]) -> dict[str, Any]:
        reply = self.http.post("/v1/submit", json={"session_id": session, "calls": calls})
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body

    def get(self, session: str, var_id: str, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/get", json={"session_id": session, "semantic_var_id": var_id, **fields})

    def value(self, session: str, var_id: str) -> str:
        reply = self.get(session, var_id)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["value"])

    def engine(self) -> dict[str, Any]:
        engine: dict[str, Any] = self.http.get("/v1/engines").json()["engines"][0]
        return engine

    def call(self, session: str, request_id: str) -> dict[str, Any]:
        calls = self.http.get(f"/v1/session/{session}/graph").json()["calls"]
        return next(call for call in calls if call["request_id"] == request_id)


@contextmanager
def service(
    model: Path, directory: Path, *options: str, wait: bool = True, **popen: Any
) -> Iterator[ServiceProcess]:
    """`parrot serve` with one small engine on a free port."""
    ready_file, log_file = directory / "ready.json", directory / "service.log"
    ready_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "parrot.cli.main", "serve", "--model", str(model), "--port", "0"]
    command += ["--num-blocks", "128", "--ready-file", str(ready_file), "-v", *options]
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stderr=log, **popen)
    try:
        running = ServiceProcess(process, ready_file, log_file)
        if wait:
            running.wait_ready()
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    # An engine looks at its pool itself, whole now and then and whenever no call is left.
    assert "the KV cache is broken" not in log_file.read_text()


def wait_for(probe: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """The first true value of ``probe``."""
    deadline = time.monotonic() + timeout_s
    while not (found := probe()):
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def call_body(
    request_id: str,
    prompt: str,
    inputs: dict[str, str] | None = None,
    values: dict[str, str] | None = None,
    **sampling: Any,
) -> dict[str, Any]:
    """A call whose only output hole is the variable of its request id."""
    sampling = {"max_tokens": 8, "ignore_eos": True, **sampling}
    holes: list[dict[str, Any]] = [
        {"name": "out", "kind": "output", "semantic_var_id": f"v-{request_id}", "sampling": sampling}
    ]
    for name, var_id in (inputs or {}).items():
        holes.append({"name": name, "kind": "input", "semantic_var_id": var_id})
    for name, value in (values or {}).items():
        holes.append({"name": name, "kind": "input", "value": value})
    return {"function": request_id, "request_id": request_id, "prompt": prompt, "placeholders": holes}
