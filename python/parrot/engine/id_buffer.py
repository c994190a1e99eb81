"""The ids of a context, which grow by one id a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..wire import Ids


class IdBuffer:
    """A growing int32 array."""

    def __init__(self, capacity: int) -> None:
        self._data = np.empty(max(capacity, 16), dtype=np.int32)
        self.length = 0  # what len() gives, for those who ask several times in every step

    def __len__(self) -> int:
        return self.length

    def view(self, start: int = 0, end: int | None = None) -> Ids:
        """``ids[start:end]`` without a copy, valid until the next change."""
        return self._data[start : self.length if end is None else min(end, self.length)]

    @property
    def last(self) -> int:
        """The last id; there is one."""
        return int(self._data[self.length - 1])

    def append(self, token_id: int) -> None:
        """Append one id."""
        if self.length == len(self._data):
            self._grow(self.length + 1)
        self._data[self.length] = token_id
        self.length += 1

    def extend(self, ids: Ids | Sequence[int]) -> None:
        """Append ids."""
        end = self.length + len(ids)
        if end > len(self._data):
            self._grow(end)
        self._data[self.length : end] = ids
        self.length = end

    def _grow(self, needed: int) -> None:
        grown = np.empty(2 * needed, dtype=np.int32)
        grown[: self.length] = self.view()
        self._data = grown

    def truncate(self, length: int) -> None:
        """Drop the ids from ``length`` on."""
        self.length = min(self.length, length)
