"""The doctor's checks: each finds its problem and names the fix."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from parrot import cpu_isa
from parrot.cli import checks
from parrot.cli.checks import Check, check_model, check_native_core, check_packages, check_port, run_checks
from parrot.manager.app import Health


def test_a_taken_port_is_broken_and_the_fix_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_HEALTH_TIMEOUT_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        check = check_port(listener.getsockname()[1])
    assert check.status == "broken"
    assert "--port" in check.fix
    assert check_port(0).status == "ok"


@pytest.fixture
def service_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a server that answers every GET with the parameter."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(request.param)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("service_port", [Health().model_dump_json().encode()], indirect=True)
def test_a_port_that_parrot_serves_on_is_ok(service_port: int) -> None:
    check = check_port(service_port)
    assert (check.status, check.detail) == ("ok", f"parrot is serving on 127.0.0.1:{service_port}")


@pytest.mark.parametrize("service_port", [b'{"status": "ok"}', b"[]", b"<html>"], indirect=True)
def test_a_port_that_another_service_holds_is_broken(service_port: int) -> None:
    assert check_port(service_port).status == "broken"


def test_a_model_directory_without_files_is_broken(tmp_path: Path) -> None:
    check = check_model(str(tmp_path))
    assert check.status == "broken"
    assert "config.json" in check.detail
    assert check.fix.startswith("parrot model install")


def test_a_native_core_that_does_not_load_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "parrot._core", None)
    check = check_native_core()
    assert check.status == "broken"
    assert "make setup" in check.fix


def test_an_instruction_set_that_there_is_not_is_no_bug_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise ValueError('PARROT_CPU_ISA = "foo" is none of scalar, avx2')

    monkeypatch.setattr(cpu_isa, "cpu_isa", refuse)
    check = check_native_core()
    assert check.status == "broken"
    assert 'PARROT_CPU_ISA = "foo" is none of' in check.detail
    assert check.fix == "correct or unset PARROT_CPU_ISA"


def test_a_missing_dependency_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MORE_MODULES", ("rich", "no_such_module"))
    check = check_packages()
    assert check.status == "broken"
    assert check.detail == "missing: no_such_module"


def test_torch_outside_its_range_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "TORCH_RANGE", ((99, 0), (99, 1)))
    check = checks.check_torch()
    assert check.status == "broken"
    assert "torch>=99.0,<99.1" in check.fix


def test_a_check_that_fails_itself_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> Check:
        raise RuntimeError("no memory information")

    monkeypatch.setattr(checks, "check_memory", explode)
    report = {check.name: check for check in run_checks("smollm2", 0)}
    assert report["memory"].status == "broken"
    assert "no memory information" in report["memory"].detail
    assert report["python"].status == "ok"
