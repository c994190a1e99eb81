"""The multi-agent application of the paper (figure 18) as a trace: calls, what their prompts share, and when
each begins and ends on an engine that runs so many at once."""

from __future__ import annotations

import heapq
import math
import random
import zlib
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Layout = Literal["history first", "role first"]

# evaluation.md, section 1, figure 18: prompt tokens, those shared with the other branches, and outputs.
PROMPT = {"architect": 251, "coder": 3658, "reviewer": 4867, "reviser": 5383}
SHARED = {"architect": 250, "coder": 3555, "reviewer": 4794, "reviser": 5268}
OUTPUT = {
    "architect": (880,),
    "coder": (684, 1077, 317, 632, 540, 247, 341, 597),
    "reviewer": (329, 364, 349, 318, 288, 262, 434, 423),
    "reviser": (692, 838, 346, 567, 554, 238, 232, 609),
}
ROUNDS = 4  # reviewers and revisers, then both again three times
PREFILL_PER_DECODE = 20  # prompt tokens computed in the time of one generated token


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt tokens; equal keys have equal tokens."""

    key: Hashable
    length: int

    def tokens(self) -> Ids:
        """Its ids."""
        seed = zlib.crc32(repr(self.key).encode())
        return np.random.default_rng(seed).integers(0, 30_000, self.length, dtype=np.int32)


@dataclass(eq=False, slots=True)
class AgentCall:
    """One call of one application; it runs when ``needs`` are done."""

    application: int
    stage: int
    segments: tuple[Segment, ...]
    num_output: int
    needs: list[AgentCall] = field(default_factory=list)

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """The prompt as a path of part keys."""
        return tuple(segment.key for segment in self.segments)

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return self.prefix_length(len(self.segments))

    def prefix_length(self, num_parts: int) -> int:
        """Tokens of the first parts."""
        return sum(segment.length for segment in self.segments[:num_parts])


@dataclass(frozen=True, slots=True)
class Event:
    """A call begins (its prompt is computed and held) or ends (its output is there, its context cached)."""

    call: AgentCall
    begins: bool


def application(number: int, num_files: int, layout: Layout) -> list[AgentCall]:
    """All calls of one application, in an order in which they can run.

    The shared counts nest (250 < 3555 < 4794 < 5268): the task, the project with its design, the code of
    the round, the reviews of the round. ``history first``: prompts are that history with the agent's
    instruction at its end, so that stages share it. ``role first``: an agent's instruction begins its prompt,
    so that only calls of one role share.
    """
    stages = ["architect", "coder", *["reviewer", "reviser"] * ROUNDS]
    calls: list[AgentCall] = []
    previous: list[AgentCall] = []
    for stage, role in enumerate(stages):
        history = tuple(_history(number, stage, role, layout))
        own = PROMPT[role] - SHARED[role]
        branches = 1 if role == "architect" else num_files
        current = [
            AgentCall(
                number,
                stage,
                (*history, Segment((number, "own", stage, file), own)),
                OUTPUT[role][file % len(OUTPUT[role])],
                list(previous),
            )
            for file in range(branches)
        ]
        calls += current
        previous = current
    return calls


def _history(number: int, stage: int, role: str, layout: Layout) -> Iterator[Segment]:
    who = role if layout == "role first" else "all"
    number_of_round = (stage - 2) // 2  # new code and new reviews come in every round
    yield Segment((number, who, "task"), SHARED["architect"])
    if role != "architect":
        yield Segment((number, who, "project"), SHARED["coder"] - SHARED["architect"])
    if role in ("reviewer", "reviser"):
        yield Segment((number, who, "code", number_of_round), SHARED["reviewer"] - SHARED["coder"])
    if role == "reviser":
        yield Segment((number, who, "reviews", number_of_round), SHARED["reviser"] - SHARED["reviewer"])


class Schedule:
    """When each call begins and ends on an engine that runs ``batch`` calls at once.

    Earlier applications go first. Applications arrive at random, ``interval`` decode steps apart on average.
    A call takes the same time whatever is cached, so that every eviction policy meets the same trace.
    """

    def __init__(
        self, applications: Sequence[Sequence[AgentCall]], *, batch: int, interval: float, seed: int
    ) -> None:
        calls = [call for calls in applications for call in calls]
        self._batch = batch
        self._order = {call: place for place, call in enumerate(calls)}
        self._num_missing = {call: len(call.needs) for call in calls}
        self._readers: dict[AgentCall, list[AgentCall]] = {call: [] for call in calls}
        for call in calls:
            for needed in call.needs:
                self._readers[needed].append(call)
        rng = random.Random(seed)
        times = accumulate([0.0, *(rng.expovariate(1 / interval) for _ in applications[1:])])
        self._arrivals = deque(
            (time, call)
            for time, calls in zip(times, applications, strict=True)
            for call in calls
            if not call.needs
        )
        self._ready: list[tuple[int, AgentCall]] = []
        self._running: list[tuple[float, int, AgentCall]] = []

    def events(self) -> Iterator[Event]:
        """Beginnings and ends in order of time."""
        now = 0.0
        while self._arrivals or self._running:
            arrives = self._arrivals[0][0] if self._arrivals else math.inf
            ends = self._running[0][0] if self._running else math.inf
            now = min(arrives, ends)
            if arrives <= ends:
                self._make_ready(self._arrivals.popleft()[1])
            else:
                call = heapq.heappop(self._running)[2]
                yield Event(call, begins=False)
                for reader in self._readers[call]:
                    self._num_missing[reader] -= 1
                    if self._num_missing[reader] == 0:
                        self._make_ready(reader)
            while self._ready and len(self._running) < self._batch:
                place, call = heapq.heappop(self._ready)
                took = call.num_output + call.num_prompt / PREFILL_PER_DECODE
                heapq.heappush(self._running, (now + took, place, call))
                yield Event(call, begins=True)

    def _make_ready(self, call: AgentCall) -> None:
        heapq.heappush(self._ready, (self._order[call], call))
