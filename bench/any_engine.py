"""An engine that runs prompts of given ids and says how long it took: ours in this process, or a peer's."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from parrot.dummy_model import num_control_tokens


class AnyEngine(ABC):
    """An engine with prefix caching; the outputs have given lengths."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], num_outputs: Sequence[int], temperature: float = 0.0
    ) -> float:
        """Seconds from the first submit until all calls have ended; RuntimeError if one fails."""

    def random_ids(self, count: int) -> list[int]:
        """Ids that no earlier call had, but by chance; no control tokens."""
        return self._random.choices(range(num_control_tokens(), self._vocab_size - 10), k=count)

    def ms_per_token(self, prompts: Sequence[Sequence[int]], few: int, many: int) -> float:
        """Milliseconds of a decode step with these prompts cached: two runs that differ in length only."""
        count = len(prompts)
        short = self.generate(prompts, [few] * count)
        long = self.generate(prompts, [many] * count)
        return (long - short) / (many - few) * 1e3
