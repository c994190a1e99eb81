"""What getters ask of a variable: an objective with its target, and how several of them merge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..api import Criteria

_STRICTNESS: tuple[Criteria, ...] = ("THROUGHPUT", "DEADLINE", "TPOT", "TTFT", "LATENCY")


@dataclass(frozen=True, slots=True)
class Demand:
    """The strictest ``criteria`` that was asked for, and the earliest of each target, in microseconds of the
    manager's clock: when the first token is due, when the whole value is, and what a token may take.
    ``expires_us``: when nobody wants the value any more; None while somebody asked without a deadline."""

    criteria: Criteria
    first_token_by_us: int | None = None
    due_us: int | None = None
    per_token_us: int | None = None
    expires_us: int | None = None

    @classmethod
    def of(cls, criteria: Criteria, target_ms: float | None, *, now_us: int) -> Demand:
        """One label; ``target_ms`` counts from now, and is None exactly for LATENCY and THROUGHPUT."""
        target_us = round((target_ms or 0) * 1000)
        match criteria:
            case "TTFT":
                return cls(criteria, first_token_by_us=now_us + target_us)
            case "TPOT":
                return cls(criteria, per_token_us=target_us)
            case "DEADLINE":
                return cls(criteria, due_us=now_us + target_us, expires_us=now_us + target_us)
            case _:
                return cls(criteria)

    def merge(self, other: Demand) -> Demand:
        """What both ask for."""
        return Demand(
            max(self.criteria, other.criteria, key=_STRICTNESS.index),
            _both(min, self.first_token_by_us, other.first_token_by_us),
            _both(min, self.due_us, other.due_us),
            _both(min, self.per_token_us, other.per_token_us),
            None
            if self.expires_us is None or other.expires_us is None
            else max(self.expires_us, other.expires_us),
        )

    @property
    def has_time(self) -> bool:
        """Whether some target is a point in time."""
        return self.first_token_by_us is not None or self.due_us is not None


def _both(pick: Callable[[int, int], int], one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return pick(one, other)


def earliest(*times_us: int | None) -> int | None:
    """The least of those that are there."""
    return min((time_us for time_us in times_us if time_us is not None), default=None)
