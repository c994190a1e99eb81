"""Paged attention on the CPU, natively: the engine's default there. :mod:`.attention` is its torch twin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import _core
from .._core import TensorView

I32 = npt.NDArray[np.int32]
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_MAX_HEAD_DIM = 512
_MAX_I32 = np.iinfo(np.int32).max


class CpuAttention:
    """Attention of an engine's steps: :meth:`plan` once per step, then the object once per layer.

    Decoding sequences that name the same physical blocks read them once (paper section 5.3). Softmax and sums
    are fp32. It runs on ``torch.get_num_threads()`` threads of the core's own pool.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for a model shape or dtype that :meth:`supports` denies."""
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype}, expected one of {', '.join(map(str, _DTYPES))}")
        self.dtype = dtype
        self._native = _core.CpuAttention(num_heads, num_kv_heads, head_dim, _DTYPES[dtype])

    @staticmethod
    def supports(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there is a kernel: float32 or bfloat16, head sizes that are multiples of 16 up to 512."""
        return (
            device.type == "cpu" and dtype in _DTYPES and head_dim % 16 == 0 and 0 < head_dim <= _MAX_HEAD_DIM
        )

    def plan(
        self,
        query_start: Sequence[int] | I32,
        seq_lens: Sequence[int] | I32,
        block_tables: Tensor | I32,
        num_blocks: int,
        *,
        share: bool = True,
    ) -> None:
        """Plan one step of n sequences, which have at least one row each.

        ``query_start`` [n + 1]: first row of each sequence in the step, then the number of rows. ``seq_lens``
        [n]: length of each, its rows included. ``block_tables`` int32 or int64 [n, max_blocks], of blocks in
        [0, num_blocks), the size of the cache; entries past the end of a sequence are not used. ``share``
        off: every sequence reads its own tokens. Raises ValueError naming argument and values.
        """
        self._native.plan(
            np.asarray(query_start, dtype=np.int32),
            np.asarray(seq_lens, dtype=np.int32),
            _int32_table(block_tables),
            num_blocks,
            num_threads=torch.get_num_threads(),
            share=share,
        )

    def __call__(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None = None, *, scale: float
    ) -> Tensor:
        """Attention of each row over its sequence up to and including itself; returns ``out``.

        ``query`` and ``out`` [T, heads, head_dim], of which the rows may lie apart; ``k_cache``, ``v_cache``
        [num_blocks, 16, kv_heads, head_dim], contiguous, each block in the order of :func:`pack_blocks`, in
        which this step's keys and values are already written. Slots past the end of a sequence may hold
        anything, NaN too. Raises ValueError for a tensor of another dtype, device, shape or layout,
        naming it.
        """
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype)
        self.run(
            self.view("query", query),
            self.view("k_cache", k_cache),
            self.view("v_cache", v_cache),
            self.view("out", out),
            scale=scale,
        )
        return out

    @property
    def num_sharing(self) -> int:
        """Decodes of the plan that read a part of their tokens together with others."""
        return self._native.num_sharing

    def run(
        self, query: TensorView, k_cache: TensorView, v_cache: TensorView, out: TensorView, *, scale: float
    ) -> None:
        """The same for tensors that were looked at before, and live still: it saves a step some
        microseconds per layer."""
        self._native.run(query, k_cache, v_cache, out, scale)

    def view(self, name: str, tensor: Tensor) -> TensorView:
        """For :meth:`run`. Raises ValueError for another dtype or device, naming the tensor."""
        if tensor.dtype is not self.dtype or tensor.is_cuda:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, expected {self.dtype} on cpu")
        return TensorView(tensor.data_ptr(), tensor.shape, tensor.stride())


def pack_blocks(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of blocks [num_blocks, 16, kv_heads, head_dim] in the order of ``csrc/kernels/cpu/kv_block.h``,
    in which ``rope_append`` writes them and attention reads them. Their shape stays."""
    num_blocks, tokens, heads, size = keys.shape
    pair = 4 // keys.itemsize
    k_words = keys.reshape(num_blocks, tokens, heads, size // pair, pair).permute(0, 2, 3, 1, 4)
    v_words = values.reshape(num_blocks, tokens // pair, pair, heads, size).permute(0, 3, 1, 4, 2)
    return k_words.reshape(keys.shape), v_words.reshape(values.shape)


def _int32_table(tables: Tensor | I32) -> I32:
    """As the core wants it. A number that int32 does not hold stays one that no cache has."""
    array = tables.numpy() if isinstance(tables, Tensor) else tables
    if array.dtype != np.int32:
        array = np.clip(array, -1, _MAX_I32).astype(np.int32)
    return np.ascontiguousarray(array)
