"""A load for the scheduler: calls of many tenants, and engines that finish the oldest call first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parrot._core import Scheduler

Ids = npt.NDArray[np.int32]
GROUP = 8  # calls of an application, and of its task group
PROMPT, HEAD, NEW = 200, 128, 50  # tokens of a prompt, of the head that a tenant's calls share, of an answer
TENANTS = 50
BATCH = 16  # calls that an engine takes at once
CONTEXTS = 4  # finished contexts that an engine keeps


@dataclass(frozen=True, slots=True)
class Workload:
    """``groups``: calls come in task groups of eight. ``prefixes``: a tenant's calls share a head, and a
    finished call's context stays on its engine until a later one takes its place. ``tight``: what bounds an
    engine is its tokens, and some are always left, too few for a call."""

    name: str
    groups: bool = False
    prefixes: bool = False
    tight: bool = False

    @property
    def capacity_tokens(self) -> int:
        """Of an engine: room for BATCH calls and half a one, or for many more."""
        return BATCH * (PROMPT + NEW) + (PROMPT + NEW) // 2 if self.tight else 64_000


WORKLOADS = (
    Workload("alone"),
    Workload("prefixes", prefixes=True),
    Workload("groups", groups=True),
    Workload("groups, prefixes", groups=True, prefixes=True),
)
TIGHT = Workload("tight", tight=True)


class Driver:
    """A scheduler, its engines' part of the story, and the calls to come."""

    def __init__(self, workload: Workload, num_engines: int, num_calls: int) -> None:
        self.scheduler = Scheduler(hash_key=bytes(range(16)))
        self.workload = workload
        self.now_us = 0
        self.num_placed = 0
        self._next = 0
        self._prompts = _prompts(workload, num_calls)
        self._boundaries = np.array([HEAD, PROMPT] if workload.prefixes else [PROMPT], np.int32)
        self._in_flight: deque[tuple[int, int]] = deque()
        self._contexts: deque[tuple[int, int]] = deque(maxlen=max(1, CONTEXTS * num_engines))
        for engine_id in range(num_engines):
            self.scheduler.add_engine(
                engine_id,
                base_us=8_000,
                per_sequence_us=40,
                per_prefill_token_us=25,
                per_kv_token_us=0.1,
                capacity_tokens=workload.capacity_tokens,
                max_batch_size=4 * BATCH if workload.tight else BATCH,
            )

    def submit(self) -> None:
        """The next call comes."""
        call_id = self._next
        self._next += 1
        app_id = call_id // GROUP
        self.scheduler.submit(
            call_id,
            app_id=app_id,
            app_arrival_us=self.now_us,
            now_us=self.now_us,
            domain=app_id % TENANTS,
            latency=False,
            group_id=0 if self.workload.groups else -1,
            depth=0,
            token_ids=self._prompts[call_id],
            boundaries=self._boundaries,
            max_new_tokens=NEW,
        )

    def schedule(self) -> None:
        """Place what there is room for."""
        placements = self.scheduler.schedule(self.now_us)
        self.num_placed += len(placements)
        self._in_flight.extend((placement.call_id, placement.engine_id) for placement in placements)

    def finish(self) -> None:
        """The call that has run longest is done; the oldest context makes room for its own."""
        call_id, engine_id = self._in_flight.popleft()
        context_id = 0
        if self.workload.prefixes:
            context_id = call_id + 1
            if len(self._contexts) == self._contexts.maxlen:
                self.scheduler.forget_context(*self._contexts[0], 0)
            self._contexts.append((engine_id, context_id))
        self.scheduler.finish(call_id, now_us=self.now_us, context_id=context_id, num_tokens=PROMPT + NEW)


def _prompts(workload: Workload, count: int) -> list[Ids]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 30_000, (count, PROMPT), dtype=np.int32)
    if workload.prefixes:
        heads = rng.integers(0, 30_000, (TENANTS, HEAD), dtype=np.int32)
        prompts[:, :HEAD] = heads[np.arange(count) // GROUP % TENANTS]
    return list(prompts)
