"""How long a step of a call may take, from the cost models that engines report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..wire import CostModel

CHARS_PER_TOKEN = 4
_BATCH = 8  # sequences beside which a latency-bound call typically runs


@dataclass(frozen=True, slots=True)
class Pace:
    """Microseconds per prompt token and per generated token; 0 while no engine has said."""

    base_us: float = 0
    per_prefill_token_us: float = 0
    per_token_us: float = 0

    @classmethod
    def of(cls, cost_models: Iterable[CostModel], *, kv_tokens: int) -> Pace:
        """Of the slowest engine, which holds ``kv_tokens`` (what latency-bound calls allow at most)."""
        paces = [
            cls(
                cost.base_us,
                cost.per_prefill_token_us,
                cost.base_us
                + cost.per_sequence_us * _BATCH
                + cost.per_kv_token_us * min(kv_tokens, cost.capacity_tokens),
            )
            for cost in cost_models
        ]
        return max(paces, key=lambda pace: pace.per_token_us, default=cls())

    def prefill_us(self, num_tokens: float) -> float:
        """Until the first token."""
        return self.base_us + self.per_prefill_token_us * num_tokens

    def decode_us(self, num_tokens: float) -> float:
        """From the first token to the last."""
        return self.per_token_us * max(num_tokens - 1, 0)
