"""What one step of an engine computes, and the paged KV cache it computes on."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SetupError
from ..kernels.draws import Draws
from .model_config import ModelConfig

BLOCK_SIZE = 16


@dataclass(slots=True)
class StepBatch:
    """The tokens of one step, of all sequences one after the other (prefill chunks and decodes mixed).

    Sequence ``i`` has the rows ``[query_start[i], query_start[i + 1])``; its tokens are the last ones of the
    ``seq_lens[i]`` tokens that it has after this step. The tensors are best on the host, where steps are
    planned; a backend takes to its device what it reads there.
    """

    token_ids: Tensor  # int64 [T]; -1 - r: previous_ids[r]
    positions: Tensor  # int64 [T], position of each token within its sequence
    slots: Tensor  # int64 [T], block * 16 + offset: where the token's K and V go
    query_start: list[int]  # [n + 1], ascending, first 0, last T
    seq_lens: list[int]  # [n], length of each sequence, this step's tokens included
    block_tables: Tensor  # int64 [n, max_blocks], -1 past the end
    logit_rows: Tensor  # int64 [m], rows of [0, T) of which logits are wanted
    previous_ids: Tensor | None = None  # int64, on the model's device: ids that the host does not know yet
    draws: Draws | None = None  # [m], how the id of each row of logits is to be chosen, where the step can


class StepLogits(NamedTuple):
    """What a step computed for the rows that are wanted; valid until the next step."""

    logits: Tensor  # [m, vocab], float32 or the model's dtype
    likeliest: Tensor | None = None  # int64 [m], if known: the likeliest id, -1 where a logit is not finite
    drawn: Tensor | None = None  # int64 [m], if the step chose ids by its draws: those


@dataclass(slots=True)
class PagedKV:
    """Keys and values of every layer: separate tensors [num_blocks, 16, kv_heads, head_dim] (section 5.3).

    The order within a block is that of its backend: tokens one after the other, but on a CPU as
    ``csrc/kernels/cpu/kv_block.h`` says.
    """

    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, dtype: torch.dtype, device: torch.device | str
    ) -> PagedKV:
        """Zeroed tensors for ``num_blocks`` blocks of every layer. Raises :class:`SetupError`."""
        shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)

        def per_layer() -> list[Tensor]:
            if torch.device(device).type == "cpu":
                return list(host_zeros((config.num_layers, *shape), dtype))
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

        try:
            return cls(k=per_layer(), v=per_layer())
        except (RuntimeError, OSError, OverflowError):  # what host_zeros and torch raise
            size = num_blocks * BLOCK_SIZE * config.kv_bytes_per_token(dtype) / 2**30
            raise SetupError(
                f"num_blocks = {num_blocks}: {size:.1f} GiB of KV cache cannot be allocated on {device}; "
                "give fewer, or none to have them sized from free memory",
                param="num_blocks",
            ) from None

    def copy_slots(self, copies: Tensor) -> None:
        """Carry out copy-on-write: ``copies`` int32 [n, 3] of (source block, destination block, number of
        slots from offset 0), as ``ContextTree.reserve`` returns them. Destinations are distinct and no
        destination is a source. Blocks are copied whole: the order within is the backend's."""
        if copies.numel() == 0:
            return
        source, destination, _ = copies.to(torch.int64).to(self.k[0].device, non_blocking=True).unbind(1)
        for cache in (*self.k, *self.v):
            cache[destination] = cache[source]


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the host, which take memory once they are written; in huge pages on Linux, because blocks are
    read in any order, and each lies in another small page. Raises RuntimeError, OSError or OverflowError."""
    if sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # a wish; without it the pages are small
    return torch.frombuffer(memory, dtype=dtype).view(shape)
