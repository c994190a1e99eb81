"""Log-probabilities of generated ids: those of the model itself, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import wire

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


class LogprobLog:
    """What one output has so far: for each generated id its own and the ``num_top`` best."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._ids: list[int] = []
        self._values: list[float] = []
        self._top_ids: list[I32] = []  # each [num_top]
        self._top_values: list[F32] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, token_id: int, value: float, top_ids: I32, top_values: F32) -> None:
        """One more id; the best ones may be more than ``num_top``, best first."""
        self._ids.append(token_id)
        self._values.append(value)
        self._top_ids.append(top_ids[: self.num_top])
        self._top_values.append(top_values[: self.num_top])

    def pack(self, start: int, end: int) -> wire.Logprobs:
        """Those of the ids ``[start, end)`` of the output."""

        def rows(parts: Sequence[I32] | Sequence[F32], dtype: str) -> bytes:
            return np.concatenate([np.empty(0), *parts[start:end]]).astype(dtype).tobytes()

        return wire.Logprobs(
            num_top=self.num_top,
            token_ids=wire.pack_ids(self._ids[start:end]),
            values=np.array(self._values[start:end], dtype="<f4").tobytes(),
            top_ids=rows(self._top_ids, "<i4"),
            top_values=rows(self._top_values, "<f4"),
        )


class PromptLog:
    """What a call has so far of its prompt's log-probabilities: those of the ids ``[1, 1 + len(log))``.

    The logits at a position say how likely the id after it was. So positions below ``len(log)`` may come from
    a cache, and the others must be computed, whatever is cached of them."""

    def __init__(self, num_top: int, prompt_len: int) -> None:
        self.log = LogprobLog(num_top)
        self._end = prompt_len - 1  # the last id of the prompt predicts the output

    def positions(self, start: int, end: int) -> range:
        """Those of the positions ``[start, end)`` whose logits are to be logged, in order."""
        return range(max(start, len(self.log)), min(end, self._end))

    def pack(self) -> wire.Logprobs:
        """All of it."""
        return self.log.pack(0, len(self.log))


def log_batch(logs: Sequence[LogprobLog], logits: Tensor, ids: Tensor) -> None:
    """Add one id to each log. ``logits`` float [n, vocab] as the model gave them, ``ids`` int64 [n]."""
    table = torch.log_softmax(logits.float(), dim=1)
    chosen: list[float] = table.gather(1, ids[:, None])[:, 0].tolist()
    num_top = min(max(log.num_top for log in logs), table.shape[1])
    top = torch.topk(table, num_top, dim=1)
    top_ids, top_values = top.indices.cpu().numpy().astype(np.int32), top.values.cpu().numpy()
    for i, (log, token_id) in enumerate(zip(logs, ids.tolist(), strict=True)):
        log.add(token_id, chosen[i], top_ids[i], top_values[i])
