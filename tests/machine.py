"""How slow this machine is: limits of processor time hold for one machine, and the tests run on others."""

from __future__ import annotations

import time

_REFERENCE_S = 0.0103  # where the limits in the tests were set


def slowness() -> float:
    """How many times the processor time of that machine this one takes for the same work; 1 at least. To be
    asked again for each limit: it depends on who shares the core."""
    return max(1.0, min(_work() for _ in range(5)) / _REFERENCE_S)


def _work() -> float:
    began = time.process_time()
    found: dict[str, tuple[int, str]] = {}
    for number in range(40_000):
        found[f"k{number % 1000}"] = (number, str(number))
    return time.process_time() - began
