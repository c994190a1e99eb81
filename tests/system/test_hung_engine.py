"""An engine process that is stopped: the service says so in time, and waiting gets end all the same."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from service_process import call_body, service, wait_for

pytestmark = pytest.mark.system
LOST_AFTER_S = 5.0  # by the service's own clock: a busy machine may let it look later


def test_readiness_follows_a_stopped_engine_within_the_heartbeat_limit_and_its_call_runs_again(
    slow_model: Path, tmp_path: Path
) -> None:
    with service(slow_model, tmp_path) as running, ThreadPoolExecutor(1) as threads:
        pid, session = running.engine()["pid"], running.session()
        running.submit(session, call_body("a", "Hi {{output:out}}", max_tokens=700))
        got = threads.submit(running.get, session, "v-a")
        wait_for(lambda: running.call(session, "a")["state"] == "running")
        os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            wait_for(lambda: running.http.get("/ready").status_code == 503, 120)
            assert time.monotonic() - stopped > 2, "it was not lost for a missing heartbeat or two"
            assert "engine-0 is lost" in running.http.get("/ready").text
            assert f"is gone: no frame for {LOST_AFTER_S:g} s" in running.log_file.read_text()
            assert not got.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: running.http.get("/ready").status_code == 200)
        assert running.engine()["pid"] == pid, "the same process has joined anew"
        assert got.result(120).status_code == 200
        assert running.call(session, "a")["attempts"] == 2
        wait_for(lambda: running.engine()["stats"]["num_held_blocks"] == 0)
