"""Every operation does what the OpenAPI document says of it, whatever is sent; schemathesis sends it.

It enumerates the borders of every parameter and field, valid and not ("coverage"), and draws whole requests
("fuzzing"). It runs as its own program: beside another core's service, and under any version of pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import httpx
import pytest

from parrot.manager import early_gets
from service_thread import service_in_thread

HOOKS = Path(__file__).with_name("schemathesis_hooks.py")
OPTIONS = (
    *("--phases", "coverage,fuzzing", "--max-examples", "8"),
    *("--generation-deterministic", "--continue-on-failure"),
    # Rules between fields (some criteria need a target, holes need bindings) are not in the document.
    *("--exclude-checks", "positive_data_acceptance"),
    *("--warnings", "off", "--no-color", "--output-sanitize", "false", "--request-timeout", "30"),
)


def test_every_operation_keeps_to_the_document(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_gets, "LONGEST_S", 0.1)  # gets of submits that never come
    answers = tmp_path / "answers"
    with service_in_thread(tiny_model) as url:
        settings = {"URL": url, "MODEL": str(tiny_model), "ANSWERS": str(answers)}
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *OPTIONS],
            env={
                **os.environ,
                "SCHEMATHESIS_HOOKS": str(HOOKS),
                **{f"PARROT_{key}": value for key, value in settings.items()},
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        paths = httpx.get(f"{url}/openapi.json", timeout=120).json()["paths"]
    statuses = defaultdict(set)
    for line in answers.read_text().splitlines():
        label, status = line.split("\t")
        statuses[label].add(int(status))
    assert statuses.keys() == {f"{verb.upper()} {path}" for path, verbs in paths.items() for verb in verbs}
    assert not [label for label, seen in statuses.items() if not seen & {200, 204}], "never got through"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
