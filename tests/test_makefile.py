"""What `make setup` prints, with a stand-in for the Python of its environment, and what builds need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = f"""#!/bin/bash
case "$*" in
  "-m pip "*"$FAIL"*) echo "ERROR: no matching distribution" >&2; exit 1 ;;
  "-m pip install -q "*) ;;
  "-m pip -v "*) for i in $(seq 40); do echo "  [$i/40] Building CXX object $i.o"; done ;;
  "-m pip "*) echo "Collecting something" ;;
  "-c print(1)") echo 1 ;;
  "-c import tomllib"*) exec {sys.executable} "$@" ;;
esac
"""


def make_setup(venv: Path, fail: str = "nothing fails", **settings: str) -> subprocess.CompletedProcess[str]:
    """With an environment that is there and has nothing installed; pip fails for what holds ``fail``."""
    (venv / ".stamps").mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / ".stamps" / "venv").touch()
    (venv / "bin" / "python").write_text(PYTHON)
    (venv / "bin" / "python").chmod(0o755)
    return subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", "setup", f"VENV={venv}"],
        env={"PATH": os.environ["PATH"], "FAIL": fail, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_setup_prints_its_headings_and_little_else(tmp_path: Path) -> None:
    done = make_setup(tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    headings = [line for line in lines if "==> " in line]
    assert len(headings) == 5  # the environment itself is there
    others = [line for line in lines if line not in headings]
    assert "nvcc" in others[0]
    assert others[1:] == [f"    [{count}/40] Building CXX object {count}.o" for count in (10, 20, 30, 40)]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"PARROT_CUDA": "OFF"}, "without the CUDA module (PARROT_CUDA=OFF)"),
        ({"CUDACXX": "no-such-nvcc"}, "no nvcc was found: without the CUDA module"),
        ({"CUDACXX": "cat"}, "takes minutes more; make setup PARROT_CUDA=OFF leaves it out"),
    ],
)
def test_setup_says_first_whether_it_builds_the_cuda_module(
    tmp_path: Path, settings: dict[str, str], says: str
) -> None:
    lines = make_setup(tmp_path / "venv", **settings).stdout.splitlines()
    begin = next(index for index, line in enumerate(lines) if "[5/5]" in line)
    assert says in lines[begin + 1]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("fail", "num_headings"), [("numpy", 1), ("deps.txt", 2), ("smollm2", 3)])
def test_what_pip_says_of_a_failure_is_shown_and_ends_the_setup(
    tmp_path: Path, fail: str, num_headings: int
) -> None:
    done = make_setup(tmp_path / "venv", fail)
    assert done.returncode != 0
    assert "ERROR: no matching distribution" in done.stderr
    assert done.stdout.count("==> ") == num_headings


def test_the_extra_build_has_what_a_build_in_isolation_gets() -> None:
    """`make setup` and `make wheel` build in the environment itself, who installs the sources does not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["build"]
    by_itself = ("cmake>", "ninja>")  # scikit-build-core asks for them
    assert [needed for needed in extra if not needed.startswith(by_itself)] == sorted(
        project["build-system"]["requires"]
    )
