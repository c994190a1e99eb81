"""What a ``get`` asks of a variable, and of everything it depends on (paper sections 4.1 and 5.2)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import StrEnum

from ..api import Criteria
from ..errors import UnsupportedParameter

_MAX_TARGET_S = 86_400


class Perf(StrEnum):
    """The objectives that need no target."""

    LATENCY = "LATENCY"
    THROUGHPUT = "THROUGHPUT"


LATENCY = Perf.LATENCY
THROUGHPUT = Perf.THROUGHPUT


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective with its target in seconds, which counts from ``begun`` (of the monotonic clock), the time
    of the get. Made by :func:`ttft`, :func:`tpot` and :func:`deadline`."""

    criteria: Criteria
    target_s: float | None = None
    begun: float | None = None

    def begin(self) -> Objective:
        """The same from now on."""
        return replace(self, begun=time.monotonic())

    @property
    def target_ms(self) -> float | None:
        """What is left of the target, at least a millisecond; of a target per token all of it."""
        if self.target_s is None:
            return None
        passed_s = 0.0 if self.begun is None or self.criteria == "TPOT" else time.monotonic() - self.begun
        return max(1000 * (self.target_s - passed_s), 1.0)


Asked = Perf | Objective | str


def ttft(seconds: float) -> Objective:
    """The first token ``seconds`` from the get on."""
    return _target("TTFT", seconds)


def tpot(seconds: float) -> Objective:
    """Each token within ``seconds`` of the one before it."""
    return _target("TPOT", seconds)


def deadline(seconds: float) -> Objective:
    """The value ``seconds`` from the get on; after that it is wanted no more, and the get ends with
    :class:`DeadlineExceeded`."""
    return _target("DEADLINE", seconds)


def _target(criteria: Criteria, seconds: float) -> Objective:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"P.{criteria.lower()}: {seconds!r} is not a number of seconds")
    if not 0 < seconds <= _MAX_TARGET_S:
        raise ValueError(f"P.{criteria.lower()}: {seconds} is not in (0, {_MAX_TARGET_S}] seconds")
    return Objective(criteria, float(seconds))


def to_objective(perf: Asked) -> Objective:
    """The objective that ``perf`` says; raises :class:`UnsupportedParameter` for anything else."""
    if isinstance(perf, Objective):
        return perf
    try:
        return Objective(Perf(perf).value)
    except ValueError:
        raise UnsupportedParameter(
            f"perf={perf!r} is not supported; use P.LATENCY, P.THROUGHPUT, P.ttft(seconds), P.tpot(seconds) "
            "or P.deadline(seconds)",
            param="perf",
        ) from None
