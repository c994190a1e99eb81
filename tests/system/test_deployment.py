"""The commands of docs/deployment.md as they stand: a manager, an engine that joins over TCP and CURVE, and
a request, each in a directory of its own in place of a machine of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from service_process import START_TIMEOUT_S, wait_for

DOCS = Path(__file__).parents[2] / "docs" / "deployment.md"
HOST = f"127.{os.getpid() >> 16 & 255}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"  # of this test alone


def commands(model: Path) -> list[str]:
    """The blocks of the page's section about other machines, for this machine and a small model."""
    section = DOCS.read_text().partition("## Engines on other machines\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)
    replaced = {"10.0.0.5": HOST, "/models/llama-3-8b": str(model), "llama-3-8b": model.name, "cuda:0": "cpu"}
    for old, new in replaced.items():
        assert any(old in block for block in blocks)
        blocks = [block.replace(old, new) for block in blocks]
    return blocks


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The manager's home and the engine's, with a `parrot` and an `scp` that reads from the former."""
    manager, engine, tools = (tmp_path / name for name in ("manager", "engine", "tools"))
    for directory in (manager, engine, tools):
        directory.mkdir()
    scripts = {
        "parrot": f'exec {sys.executable} -m parrot.cli.main "$@"',
        "scp": f'exec cp "${{@/#{HOST}:/{manager}/}}"',
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{script}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return manager, engine


@contextlib.contextmanager
def running(block: str, directory: Path) -> Iterator[Callable[[], str]]:
    """A block whose last command stays; gives what it has printed, and fails if it has ended."""
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-eu", "-c", block], cwd=directory, stdout=file, stderr=file, start_new_session=True
        )

    def printed() -> str:
        assert process.poll() is None, log.read_text()
        return log.read_text()

    try:
        yield printed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        wait_for(lambda: not group_lives(process.pid))


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page asks with curl")
def test_an_engine_of_another_machine_joins_by_the_commands_of_the_page(
    machines: tuple[Path, Path], tiny_model: Path
) -> None:
    manager, engine = machines
    serve, join, ask = commands(tiny_model)
    with running(serve, manager) as printed:
        key = manager / "alice.key"
        wait_for(lambda: printed() is not None and key.exists() and key.stat().st_size)
        with running(join, engine) as printed_by_engine:
            wait_for(
                lambda: printed_by_engine() is not None and "joined with model" in printed(), START_TIMEOUT_S
            )
            done = subprocess.run(
                ["bash", "-eu", "-c", ask],
                cwd=manager,
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
    assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0, done.stdout
