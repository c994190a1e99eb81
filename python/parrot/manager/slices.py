"""Long work on the loop, cut into slices, so that requests and heartbeats are answered in between.

Such work is a generator that yields wherever it may be interrupted and returns its result. All such work of
a loop shares its slices: a hundred pieces of it hold up what else is due no longer than one does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from typing import TypeVar
from weakref import WeakKeyDictionary

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
    """The result; whatever else is due on the loop runs every ``SLICE_S``, however many work like this."""
    slices = _slices_of(asyncio.get_running_loop())
    while True:
        end_s = await slices.next()
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: T = end.value
                return result
            if now_s() >= end_s:
                break


class _Slices:
    """One slice in a turn of the loop. Who comes while its time is not used up, and nobody waits, works on in
    it; the others wait, and get slices of their own in the order in which they came."""

    def __init__(self) -> None:
        self._end_s: float | None = None  # of this turn's slice
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> float:
        """Wait for a slice; returns when it ends."""
        if self._waiting or (self._end_s is not None and now_s() >= self._end_s):
            mine = asyncio.get_running_loop().create_future()
            self._waiting.append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():
                    self._wake()  # it was its turn
                raise
        if self._end_s is None:
            self._end_s = now_s() + SLICE_S
            asyncio.get_running_loop().call_soon(self._over)
        return self._end_s

    def _over(self) -> None:
        self._end_s = None
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                return


_all_slices: WeakKeyDictionary[asyncio.AbstractEventLoop, _Slices] = WeakKeyDictionary()


def _slices_of(loop: asyncio.AbstractEventLoop) -> _Slices:
    slices = _all_slices.get(loop)
    if slices is None:
        slices = _all_slices[loop] = _Slices()
    return slices
