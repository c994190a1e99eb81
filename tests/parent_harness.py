"""Processes that outlive their parents, or do not."""

from __future__ import annotations

import os
import time
from pathlib import Path


def child_environment() -> dict[str, str]:
    """This process's, in which a child imports the same parrot."""
    import parrot

    paths = [str(Path(parrot.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_ended(pid: int) -> bool:
    """Whether it ends within a minute; nobody here can wait for it, since it is not a child."""
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)
