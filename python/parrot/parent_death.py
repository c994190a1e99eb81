"""Processes that must not outlive the one that started them, also when SIGKILL ends that."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def ask_for_signal(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends. Linux does so when the parent's
    *thread* that started this process ends, and not at all if it has ended before."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def end_with_parent(parent_pid: int) -> None:
    """From now on the end of the thread that started this process is the end of this process too, even of a
    stopped one. ``parent_pid`` comes from the parent itself: if that has ended already, so does this call."""
    ask_for_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
