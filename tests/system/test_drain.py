"""SIGTERM: nothing new is taken, what runs has its grace, streams flow to their end; twice: at once."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from service_process import ServiceProcess, call_body, is_alive, service, wait_for

pytestmark = pytest.mark.system


def stream(running: ServiceProcess, model: Path, num_tokens: int, begun: threading.Event) -> list[str]:
    """The lines of a streamed completion; ``begun`` is set at the first one."""
    body = {
        "model": str(model),
        "prompt": "Hi",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    with running.http.stream("POST", "/v1/completions", json=body) as reply:
        found = []
        for line in reply.iter_lines():
            begun.set()
            if line:
                found.append(line)
        return found


def test_a_drain_refuses_what_is_new_finishes_what_runs_and_ends_the_rest_with_a_typed_error(
    tiny_model: Path, tmp_path: Path
) -> None:
    with service(tiny_model, tmp_path, "--drain-grace-s", "6") as running, ThreadPoolExecutor(4) as threads:
        engine_pid, session = running.engine()["pid"], running.session()
        # A chain that its grace lets finish, one that it does not, and a call whose input never comes.
        unset = {"session_id": session, "variables": [{"semantic_var_id": "v-unset"}]}
        assert running.http.post("/v1/submit", json=unset).status_code == 200
        long = "Long {{input:x}} {{output:out}}"
        running.submit(
            session,
            call_body("a", "One {{output:out}}", max_tokens=150),
            call_body("b", "Two {{input:x}} {{output:out}}", {"x": "v-a"}),
            call_body("never", "Three {{input:x}} {{output:out}}", {"x": "v-unset"}),
            call_body("c0", "Zero {{output:out}}", max_tokens=400),
            *(call_body(f"c{i}", long, {"x": f"v-c{i - 1}"}, max_tokens=400) for i in range(1, 60)),
        )
        begun = threading.Event()
        gets = {name: threads.submit(running.get, session, f"v-{name}") for name in ("b", "never", "c59")}
        lines = threads.submit(stream, running, tiny_model, 200, begun)
        assert begun.wait(120)
        started = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: running.http.get("/ready").status_code == 503)
        refused = running.http.post("/v1/session")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["retry-after"]
        again = running.http.post(
            "/v1/submit", json={"session_id": session, "calls": [call_body("d", "D {{output:out}}")]}
        )
        assert again.status_code == 503
        assert lines.result(120)[-1] == "data: [DONE]"
        assert gets["b"].result(120).status_code == 200
        for name, code in (("never", "unavailable"), ("c59", "unavailable")):
            reply = gets[name].result(120)
            error = reply.json()["error"]
            assert reply.status_code in (424, 503)
            assert code in (error["code"], *(cause["code"] for cause in error["causes"]))
        assert running.process.wait(60) == 0
        assert time.monotonic() - started > 5.5
        assert not is_alive(engine_pid)


def test_a_second_sigterm_ends_the_service_at_once(slow_model: Path, tmp_path: Path) -> None:
    with service(slow_model, tmp_path, "--drain-grace-s", "60") as running, ThreadPoolExecutor(1) as threads:
        engine_pid, session = running.engine()["pid"], running.session()
        unset = {"session_id": session, "variables": [{"semantic_var_id": "v-unset"}]}
        assert running.http.post("/v1/submit", json=unset).status_code == 200
        never = call_body("never", "Three {{input:x}} {{output:out}}", {"x": "v-unset"})
        calls = [call_body(f"c{i}", "Hi {{output:out}}", max_tokens=1900) for i in range(4)]
        running.submit(session, never, *calls)
        got = threads.submit(running.get, session, "v-c0")
        wait_for(lambda: running.engine()["num_dispatched"] > 0)
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: running.http.get("/ready").status_code == 503)
        time.sleep(0.2)
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(45) == 0
        assert not is_alive(engine_pid)
        assert got.exception(120) is not None or got.result().status_code == 503


def test_a_signal_near_the_end_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Once the manager has said that it ended its process still has much to put away."""
    with service(tiny_model, tmp_path, wait=False) as running:
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "manager ended" in running.log_file.read_text())
        while running.process.poll() is None:
            running.process.send_signal(signal.SIGTERM)
            running.process.send_signal(signal.SIGINT)
            time.sleep(0.001)
        assert running.process.returncode == 0
