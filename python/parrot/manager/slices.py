"""Long work on the loop, cut into slices, so that requests and heartbeats are answered in between.

Such work is a generator that yields wherever it may be interrupted and returns its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

from .clock import now_s

T = TypeVar("T")
SLICE_S = 0.003


def run_whole(work: Generator[None, None, T]) -> T:
    """The result, without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


async def run_in_slices(work: Generator[None, None, T]) -> T:
    """The result; whatever else is due on the loop runs every ``SLICE_S``."""
    began = now_s()
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        if now_s() - began >= SLICE_S:
            await asyncio.sleep(0)
            began = now_s()
