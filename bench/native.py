"""Builds and runs the C++ drivers of the benchmarks (csrc/bench), which measure without Python around."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "bench"


def build_driver(name: str) -> Path:
    """The program of ``csrc/bench/NAME.cpp``, built if it is missing or older than its sources."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    cmake = shutil.which("cmake", path=environment["PATH"])
    if cmake is None:
        raise RuntimeError("cmake is not on PATH; the benchmark's driver cannot be built")
    options = ["-DPARROT_BENCH=ON", "-DPARROT_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    if not (BUILD / "CMakeCache.txt").exists():
        if shutil.which("ninja", path=environment["PATH"]) is not None:
            options += ["-G", "Ninja"]
        cmake_dir = _output([sys.executable, "-m", "pybind11", "--cmakedir"], environment)
        options.append(f"-Dpybind11_DIR={cmake_dir.strip()}")
        _output([cmake, "-S", str(ROOT), "-B", str(BUILD), *options], environment)
    _output([cmake, "--build", str(BUILD), "--target", name], environment)
    return BUILD / name


def run_driver(driver: Path, *arguments: object) -> dict[str, Any]:
    """What the driver prints: one line of JSON."""
    result: dict[str, Any] = json.loads(_output([str(driver), *map(str, arguments)], dict(os.environ)))
    return result


def _output(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
