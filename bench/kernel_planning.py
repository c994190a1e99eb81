"""What planning a step and its upload take of a decode step, for ``python -m bench kernel``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .kernel_arms import make_kernel
from .kernel_rows import BLOCK, Problem

BUDGET = 0.05  # of a decode step, for planning and upload
# Milliseconds that a decode step of the 7B shape with 6000 shared tokens is to take at most, by requests.
_REQUESTS = (1, 8, 16, 32, 64)
_STEP_MS = (5.3, 5.5, 5.9, 6.5, 7.5)


def step_ms(requests: int) -> float:
    """Of the 7B shape; beyond 64 requests as from 32 to 64."""
    beyond = (
        max(0, requests - _REQUESTS[-1]) * (_STEP_MS[-1] - _STEP_MS[-2]) / (_REQUESTS[-1] - _REQUESTS[-2])
    )
    return float(np.interp(requests, _REQUESTS, _STEP_MS)) + beyond


def measure_planning(problem: Problem, repeats: int) -> dict[str, Any]:
    """Median microseconds of a plan after the requests have changed places, and of one after each has grown
    by a token, the Python call and the upload to its end on the device included; and the larger one's share
    of the budget."""
    on_gpu = problem.device.type == "cuda"
    kernel = make_kernel(problem, "cuda" if on_gpu else "triton")
    tables, lens = problem.block_tables, problem.seq_lens
    turned, turned_lens = np.roll(tables, 1, axis=0), np.roll(lens, 1)
    grown = [lens - BLOCK + 1 + step for step in range(BLOCK)]  # in the last block of each

    def plan(tables: np.ndarray, lens: np.ndarray) -> float:
        start = time.perf_counter()
        kernel.plan(tables, lens)
        if on_gpu:
            torch.cuda.synchronize(problem.device)
        return 1e6 * (time.perf_counter() - start)

    def median(call: Callable[[int], float]) -> float:
        return round(statistics.median(call(i) for i in range(repeats)), 1)

    changed_us = median(lambda i: plan(turned, turned_lens) if i % 2 else plan(tables, lens))
    times: list[float] = []
    while len(times) < repeats:
        plan(tables, grown[0])
        times += [plan(tables, step) for step in grown[1:]]
    grown_us = round(statistics.median(times), 1)
    budget_us = 1e3 * BUDGET * step_ms(problem.num_requests)
    return {
        "requests": problem.num_requests,
        "changed_us": changed_us,
        "grown_us": grown_us,
        "budget_us": round(budget_us, 1),
        "of_budget": round(max(changed_us, grown_us) / budget_us, 3),
    }
