"""Many small int32 arrays that go to a device together: a pinned host buffer, a device buffer, one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .tensor_checks import made_current

I32 = npt.NDArray[np.int32]
_ALIGNMENT = 4  # elements: kernels read fields of 16 bytes at once


class Staging:
    """Named sections, in this order and of these sizes (elements), at addresses that never change.

    Write ``host`` after :meth:`wait`, then :meth:`upload`; kernels read ``device``. What is launched on the
    same stream before the upload still reads what was there before it.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        starts = np.cumsum([0] + [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()]).tolist()
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        self._starts = dict(zip(sizes, starts, strict=False))
        self.host: dict[str, I32] = {}
        self.device: dict[str, Tensor] = {}
        for name, size in sizes.items():
            start = self._starts[name]
            self.host[name] = self._host[start : start + size].numpy()
            self.device[name] = self._device[start : start + size]
        self._uploaded = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """Until the last upload has read the host buffer."""
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def upload(self, last: str, count: int) -> None:
        """One copy, on the current stream and not waited for: every section before ``last``, and ``count``
        elements of that one."""
        end = self._starts[last] + count
        with made_current(self._device.device):  # whose stream the event is recorded on
            self._device[:end].copy_(self._host[:end], non_blocking=True)
            if self._uploaded is not None:
                self._uploaded.record()
