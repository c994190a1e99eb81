"""What goes wrong, and when: each kind of fault once, then drawn by weight, all from a seed."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter

from .processes import Fleet

_PAUSE_S = (0.3, 1.5)  # between two faults
KINDS = {
    "engine SIGKILL": 2.0,
    "engine SIGSTOP": 3.0,
    "partition": 3.0,
    "messages lost": 4.0,
    "messages delayed": 3.0,
    "connection cut": 3.0,
    "manager SIGKILL": 1.0,
}


class Faults:
    """Injects faults until it is cancelled; :meth:`heal` undoes what is left of them."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._fleet = fleet
        self._random = random.Random(seed)
        self._first = self._random.sample(list(KINDS), len(KINDS))  # each of them once, then by weight
        self._busy: set[int] = set()  # engines that a fault has in its hands
        self._running: set[asyncio.Task[None]] = set()

    async def inject(self, seconds: float) -> None:
        """Faults for so long, then wait until the last ones are over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            due = [kind for kind in self._first if kind not in self.counts]
            kind = due[0] if due else self._random.choices(list(KINDS), list(KINDS.values()))[0]
            if kind == "manager SIGKILL":
                self.counts[kind] += 1
                await self._fleet.restart_manager()
            else:
                self._begin(kind)
            await asyncio.sleep(self._random.uniform(*_PAUSE_S))
        await asyncio.gather(*self._running)

    def _begin(self, kind: str) -> None:
        free = [number for number in range(len(self._fleet.engines)) if number not in self._busy]
        if len(free) < 2:  # one engine at least is left alone
            return
        number = self._random.choice(free)
        self._busy.add(number)
        self.counts[kind] += 1
        task = asyncio.get_running_loop().create_task(self._one(kind, number))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _one(self, kind: str, number: int) -> None:
        engine, wire = self._fleet.engines[number], self._fleet.wires[number]
        try:
            if kind == "engine SIGKILL":
                engine.kill()
                await asyncio.sleep(self._random.uniform(0.1, 1.0))
                engine.start()
                await asyncio.sleep(4)
            elif kind == "engine SIGSTOP":
                engine.signal(signal.SIGSTOP)
                await asyncio.sleep(self._random.choice((0.5, 2.0, 4.0, 8.0)))
                engine.signal(signal.SIGCONT)
            elif kind == "partition":
                wire.faults.partitioned = True
                await asyncio.sleep(self._random.choice((0.5, 3.0, 8.0)))
            elif kind == "messages lost":
                wire.faults.loss = self._random.choice((0.02, 0.1, 0.3))
                await asyncio.sleep(3)
            elif kind == "messages delayed":
                wire.faults.delay_s = self._random.choice((0.02, 0.2))
                await asyncio.sleep(3)
            else:
                wire.cut()
        finally:
            wire.faults.loss = wire.faults.delay_s = 0.0
            wire.faults.partitioned = False
            self._busy.discard(number)

    async def heal(self) -> None:
        """Everything runs, nothing is held up."""
        for engine in self._fleet.engines:
            engine.signal(signal.SIGCONT)
            if not engine.is_running:
                engine.start()
        if not self._fleet.manager.is_running:
            await self._fleet.restart_manager()
