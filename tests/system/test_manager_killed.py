"""The manager is killed with SIGKILL in the middle of graphs and started again with its journal."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from service_process import ServiceProcess, call_body, is_alive, kill, service, wait_for

import parrot as P

pytestmark = pytest.mark.system
PARROT = [sys.executable, "-m", "parrot.cli.main"]
NUM_CHAINS = 6
ENGINE_GONE_S = 10.0  # far below the minute that an engine waits for a silent manager
AFTER = "After {{input:x}} {{output:out}}"


@P.function(outputs=P.Output(max_tokens=8))
def begin(text):  # type: ignore[no-untyped-def]
    """Begin: {{input:text}} {{output}}"""


@P.function(outputs=P.Output(max_tokens=150, ignore_eos=True))
def go_on(text):  # type: ignore[no-untyped-def]
    """Continue: {{input:text}} {{output}}"""


def free_ports(count: int) -> list[str]:
    """Below those that the system gives to connections: nobody takes one while its manager is away."""
    ports: list[str] = []
    for port in range(10_000 + os.getpid() % 10_000, 32_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(str(port))
        if len(ports) == count:
            break
    return ports


def manager_command(model: Path, directory: Path, port: str, engine_port: str) -> list[str]:
    command = [*PARROT, "manager", "--model", str(model), "--port", port, "--engine-port", engine_port]
    return [*command, "--journal", str(directory / "journal"), "-v"]


@contextmanager
def manager(model: Path, directory: Path, port: str, engine_port: str) -> Iterator[ServiceProcess]:
    ready_file, log_file = directory / "ready.json", directory / "manager.log"
    ready_file.unlink(missing_ok=True)
    command = manager_command(model, directory, port, engine_port)
    with log_file.open("wb") as log:
        process = subprocess.Popen([*command, "--ready-file", str(ready_file)], stderr=log)
    try:
        yield ServiceProcess(process, ready_file, log_file)
    finally:
        process.kill()
        process.wait()


@contextmanager
def engine(model: Path, directory: Path, engine_port: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*PARROT, "engine", "--model", str(model), "--manager", f"tcp://127.0.0.1:{engine_port}"]
    with (directory / "engine.log").open("wb") as log:
        process = subprocess.Popen([*command, "--name", "mine", "--num-blocks", "256"], stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def start_chains() -> list[Any]:
    """Chains of three calls each, all of their variables."""
    variables: list[Any] = []
    with P.batch():
        for number in range(NUM_CHAINS):
            text: Any = f"story {number}"
            for function in (begin, go_on, go_on):
                text = function(text)
                variables.append(text)
    return variables


def check_a_second_manager_is_refused(model: Path, directory: Path) -> None:
    command = manager_command(model, directory, "0", "0")
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert "in use by another manager; stop that one, or name another file" in refused.stderr


def submit_dice(running: ServiceProcess) -> tuple[str, str]:
    """A sampled value that the client is told, and a call that reads it and has not ended; the session and
    the value."""
    session = running.session()
    running.submit(session, call_body("dice", "Any {{output:out}}", temperature=1.0))
    told = running.value(session, "v-dice")
    running.submit(session, call_body("then", AFTER, {"x": "v-dice"}, max_tokens=400))
    return session, told


def check_dice(again: ServiceProcess, session: str, told: str) -> None:
    """The value stays, and what reads it reads that."""
    assert again.value(session, "v-dice") == told
    again.submit(session, call_body("same", AFTER, values={"x": told}, max_tokens=400))
    assert again.value(session, "v-then") == again.value(session, "v-same")


def test_nothing_is_lost_when_the_manager_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    ports = free_ports(2)
    with (
        engine(tiny_model, tmp_path, ports[1]) as engine_process,
        manager(tiny_model, tmp_path, *ports) as running,
        ThreadPoolExecutor(3 * NUM_CHAINS) as threads,
        P.connect(running.url) as connection,
    ):
        running.wait_ready()
        with connection.session():
            expected = [variable.get() for variable in start_chains()]
        dice = submit_dice(running)
        getters = [threads.submit(variable.get) for variable in start_chains()]
        wait_for(getters[0].done)
        kill(running.pid)
        running.process.wait()
        assert not all(getter.done() for getter in getters)
        time.sleep(0.2)  # the clients find nobody there
        with manager(tiny_model, tmp_path, *ports) as again:
            assert [getter.result(120) for getter in getters] == expected
            check_dice(again, *dice)
            assert again.engine()["name"] == "mine"
            assert again.engine()["pid"] == engine_process.pid
            check_a_second_manager_is_refused(tiny_model, tmp_path)
            connection.close()


def test_no_engine_outlives_a_killed_manager_whose_successor_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    """`parrot serve`: its engine goes with it; the next one starts another and runs what was left."""
    journal = ("--journal", str(tmp_path / "journal"))
    with service(tiny_model, tmp_path, *journal) as running:
        session = running.session()
        running.submit(
            session,
            call_body("a", "Hi {{output:out}}"),
            call_body("b", "Then {{input:x}} {{output:out}}", {"x": "v-a"}, max_tokens=600),
        )
        told = running.value(session, "v-a")
        engine_pid = running.engine()["pid"]
        kill(running.pid)
        wait_for(lambda: not is_alive(engine_pid), ENGINE_GONE_S)
    with service(tiny_model, tmp_path, *journal, wait=False) as again:
        assert again.value(session, "v-a") == told
        assert again.get(session, "v-b", timeout_ms=120_000).json()["status"] == "ready"
