"""The one call that checks everything on a GPU loses no part's result to another's end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpu_check
from gpu_check import Part, run_all


def test_parts_that_fail_hang_or_check_nothing_cost_no_other_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, skipped in (("some", 1), ("none", 4)):
        text = f'<testsuites><testsuite tests="4" skipped="{skipped}"/></testsuites>'
        (tmp_path / f"{name}-report").write_text(text)
    reports = """-c "import os; os.link('{folder}/{name}-report', '{folder}/{name}.xml')" """
    (tmp_path / "wrong.xml").write_text("of another run")
    parts = [
        Part("wrong", "-c \"print('what', 'went wrong'); raise SystemExit(3)\"", 60),
        Part("hangs", "-c 'import time; time.sleep(600)'", 1),
        Part("some", reports, 60),
        Part("none", reports, 60),
    ]
    outcomes = run_all(parts, tmp_path, 600)
    assert [one.result for one in outcomes] == ["failed", "timeout", "ok", "failed"]
    assert [one["name"] for one in json.loads((tmp_path / "summary.json").read_text())] == [
        "wrong",
        "hangs",
        "some",
        "none",
    ]
    assert (outcomes[0].code, outcomes[2].ran, outcomes[2].skipped) == (3, 3, 1)
    assert "what went wrong" in capsys.readouterr().out
    assert run_all(parts[:1], tmp_path, 0)[0].result == "left out"


def test_a_part_that_needs_what_is_not_there_is_skipped_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "-c \"import os; raise SystemExit(os.environ.get('UNDER') != 'it')\""
    parts = [
        Part("there", command, 60, under="env UNDER=it"),
        Part("missing", command, 60, under="no-such-program --tool memcheck"),
        Part("gpus", command, 60, least_gpus=1000),
    ]
    assert [one.result for one in run_all(parts, tmp_path, 600)] == ["ok", "skipped", "skipped"]
    printed = capsys.readouterr().out
    assert "this machine has no no-such-program" in printed
    assert "this machine has no 1000 GPUs" in printed


def test_every_file_with_tests_for_a_gpu_is_in_a_part() -> None:
    commands = " ".join(part.command for part in gpu_check.PARTS)
    for path in Path(__file__).parent.rglob("test_*.py"):
        if "pytest.mark.gpu" in path.read_text().replace('"pytest.mark.gpu"', ""):
            assert f"/{path.name}" in commands, path.name
