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
        Part("wrong", "-c \"print('what', 'went wrong'); raise SystemExit(3)\"", 60, least_gpus=0),
        Part("hangs", "-c 'import time; time.sleep(600)'", 1, least_gpus=0),
        Part("some", reports, 60, least_gpus=0),
        Part("none", reports, 60, least_gpus=0),
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
        Part("there", command, 60, under="env UNDER=it", least_gpus=0),
        Part("missing", command, 60, under="no-such-program --tool memcheck", least_gpus=0),
        Part("gpus", command, 60, least_gpus=1000),
    ]
    outcomes = run_all(parts, tmp_path, 600)
    assert [one.result for one in outcomes] == ["ok", "skipped", "skipped"]
    assert gpu_check.exit_code(outcomes) == 0
    printed = capsys.readouterr().out
    assert "needs no-such-program, which is not on PATH" in printed
    assert "needs 1000 GPUs, torch finds " in printed


def test_without_a_gpu_nothing_is_checked_and_that_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "device_count", lambda: 0)
    outcomes = run_all(list(gpu_check.PARTS), tmp_path, 600)
    assert {one.result for one in outcomes} == {"skipped"}
    assert gpu_check.exit_code(outcomes) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("machine")
    assert "needs 1 GPU, torch finds 0" in printed


def test_parts_of_one_gpu_run_where_a_part_of_two_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda program: program)
    skipped = {part.name: part.missing() for part in gpu_check.PARTS if part.missing()}
    assert skipped == dict.fromkeys(("tests-gpus", "gpus"), "needs 2 GPUs, torch finds 1")
    names = [part.name for part in gpu_check.PARTS]
    assert len(names) == len(set(names))


def test_every_file_with_tests_for_a_gpu_is_in_a_part() -> None:
    commands = " ".join(part.command for part in gpu_check.PARTS)
    for path in Path(__file__).parent.rglob("test_*.py"):
        if "pytest.mark.gpu" in path.read_text().replace('"pytest.mark.gpu"', ""):
            assert f"/{path.name}" in commands, path.name
