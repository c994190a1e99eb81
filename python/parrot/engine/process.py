"""What concerns the engine as a process: threads, cores, the parent, signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from ..parent_death import ask_for_signal


def set_passive_waits() -> None:
    """Let idle OpenMP threads sleep rather than spin, so that they leave the cores to other work. Has an
    effect only before torch is imported; what the environment already says stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def num_physical_cores() -> int:
    """Physical cores that this process may run on."""
    cpus = os.sched_getaffinity(0)
    siblings = set()
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(path.read_text().strip())
        except OSError:
            return len(cpus)
    return max(1, len(siblings))


def signal_on_parent_death(parent_pid: int, on_death: Callable[[], None]) -> None:
    """Call ``on_death`` in the main thread when the parent process has ended, also by SIGKILL; at once if it
    ended before this call, so the caller must know ``parent_pid`` from the parent itself.

    Linux sends the signal when the parent's *thread* that started us ends, hence the check of the parent.
    """

    def handle(_signal: int, _frame: object) -> None:
        if os.getppid() != parent_pid:
            on_death()

    signal.signal(signal.SIGUSR1, handle)
    ask_for_signal(signal.SIGUSR1)
    if os.getppid() != parent_pid:
        on_death()
