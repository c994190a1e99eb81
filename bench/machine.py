"""What a number was measured on and with."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

_PACKAGES = ("parrot-serve", "torch", "tokenizers", "openai", "pyzmq", "numpy")


def describe_machine() -> dict[str, str | int | float]:
    """CPU, cores, memory in GiB, operating system, commit and versions, for a result's record."""
    description: dict[str, str | int | float] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": _commit(),
    }
    for package in _PACKAGES:
        try:
            description[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return description


def say_no_gpu(instead: str) -> None:
    """On standard error, for a benchmark of GPUs that finds none."""
    print(f"no GPU was found: this measures {instead}", file=sys.stderr, flush=True)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    """The short commit, with a mark when tracked files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()
