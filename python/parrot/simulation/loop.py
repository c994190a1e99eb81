"""An asyncio loop whose time is simulated: when nothing is left to do, it is the time of the next timer.

What runs takes no time. Work for threads is done on the spot, so that the same events come in the same order.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from selectors import SelectorKey
from typing import Any, TypeVar, TypeVarTuple

from ..errors import InternalError
from ..manager.clock import simulated_clock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Moment(float):
    """A time of a timer; of two equal ones the later made is the later."""

    __slots__ = ("number",)
    number: int

    def __lt__(self, other: float) -> bool:
        if isinstance(other, _Moment) and float.__eq__(self, other):
            return self.number < other.number
        return float.__lt__(self, other)


class _Waiting(selectors.SelectSelector):
    """Stands for the wait for sockets: it moves the time instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is None:
            raise InternalError("the simulation stands still: everybody waits, and no timer is set")
        self.now_s += timeout
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. Timers that are due at the same time go in the order in which they were set:
    asyncio's own heap keeps none, and a message could overtake the one before it."""

    def __init__(self) -> None:
        self._num_timers = 0
        self._waiting = _Waiting()
        super().__init__(self._waiting)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Simulated seconds."""
        return self._waiting.now_s

    def now_us(self) -> int:
        """Simulated microseconds."""
        return round(self._waiting.now_s * 1e6)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As any loop's, for simulated seconds."""
        moment = _Moment(when)
        moment.number = self._num_timers = self._num_timers + 1
        return super().call_at(moment, callback, *args, context=context)

    def call_at_us(self, when_us: int, callback: Callable[[*Ts], object], *args: *Ts) -> asyncio.TimerHandle:
        """:meth:`call_at` for a time in microseconds."""
        return self.call_at(when_us / 1e6, callback, *args)

    def run_in_executor(
        self,
        executor: Executor | None,  # noqa: ARG002
        func: Callable[[*Ts], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        """Runs ``func`` at once."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_simulated(main: Callable[[SimulatedLoop], Coroutine[Any, Any, T]]) -> T:
    """The result of ``main`` on a new loop, with the manager's clock being the loop's."""
    loop = SimulatedLoop()
    try:
        with simulated_clock(loop.now_us):
            asyncio.set_event_loop(loop)
            return loop.run_until_complete(main(loop))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
