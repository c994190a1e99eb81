"""SharedPrefixAttention: decode attention that reads each shared K/V tile once per batch (paper section 5.3).

:class:`SharedPrefixAttention` owns the fixed-size device buffers of a plan, so that a CUDA graph captured on
one tree of contexts can be replayed on another; :func:`shared_prefix_attention_reference` is its torch twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import _core

I32 = npt.NDArray[np.int32]
Implementation = Literal["cuda", "triton"]
_Launch = Callable[[Tensor, Tensor, Tensor, Tensor, float], None]
BLOCK_SIZE = 16
MAX_ROWS = 64  # query rows of one entry, as the kernel's tile has
_ENTRY_FIELDS = 8


def shared_prefix_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: list[int],
    scale: float,
) -> Tensor:
    """Attention of one query token per request over its blocks, in the dtype of ``query`` (use float64).

    query [n, heads, head_dim]; caches [num_blocks, 16, kv_heads, head_dim]; block_tables [n, max_blocks],
    -1 past the end; seq_lens n lengths. Returns [n, heads, head_dim].
    """
    group = query.shape[1] // key_cache.shape[2]
    rows = []
    for request, length in enumerate(seq_lens):
        blocks = block_tables[request, : -(-length // BLOCK_SIZE)].long()
        keys = key_cache[blocks].flatten(0, 1)[:length].to(query.dtype).repeat_interleave(group, dim=1)
        values = value_cache[blocks].flatten(0, 1)[:length].to(query.dtype).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", query[request], keys) * scale
        rows.append(torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values))
    return torch.stack(rows)


def count_sharing(entries: I32, members: I32) -> int:
    """Requests that some entry of a plan reads together with others (csrc/kvcache/attention_plan.h)."""
    shared = entries[entries[:, 4] > 1]
    if len(shared) == 0:
        return 0
    counts = shared[:, 4]
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return len(np.unique(members[np.repeat(shared[:, 3], counts) + offsets, 0]))


class SharedPrefixAttention:
    """The kernel with its plan buffers, for one model shape on one device. ``implementation``: the CUDA
    kernel, or its Triton twin, which needs no nvcc (and runs on the CPU in Triton's interpreter).

    Call :meth:`plan` once per step, then the object once per layer. Raises ``ValueError`` for shapes, dtypes
    or devices that do not fit, naming the argument and both values.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_blocks: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        max_parts: int = 8192,
        implementation: Implementation = "cuda",
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.max_requests, self.max_blocks = max_requests, max_blocks
        self._device = device
        self._dtypes = [torch.float16, torch.bfloat16] + [torch.float32] * (implementation == "triton")
        self._planner = _core.AttentionPlanner()
        self._allocate_plan(max_parts)
        self._part_output = torch.empty(max_parts, num_heads, head_dim, device=device)
        self._part_max_sum = torch.empty(max_parts, num_heads, 2, device=device)
        self._launch, self.num_workers = self._choose(implementation)
        self._next_work = torch.zeros(2, dtype=torch.int32, device=device)
        self.num_requests = self.num_entries = self.num_parts = 0
        self.num_sharing = 0  # requests that read a part of their tokens together with others

    def _choose(self, implementation: Implementation) -> tuple[_Launch, int]:
        """The launch of an implementation, and how many entries it works on at once."""
        if implementation == "triton":
            from .shared_prefix_triton import num_triton_workers

            return self._launch_triton, num_triton_workers(self._device)
        from .. import _kernels  # present only where nvcc was found

        self._kernels = _kernels
        with torch.cuda.device(self._device):
            return self._launch_cuda, _kernels.shared_prefix_attention_grid(self.head_dim)

    def _allocate_plan(self, max_parts: int) -> None:
        """One host buffer and one device buffer with the same layout, so that a plan is one copy."""
        sizes = {
            "num_entries": 4,
            "entries": max_parts * _ENTRY_FIELDS,
            "members": max_parts * 2,
            "part_begin": self.max_requests + 4 - self.max_requests % 4,
            "block_tables": self.max_requests * self.max_blocks,
        }
        total = sum(sizes.values())
        on_gpu = self._device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=on_gpu)
        self._plan = torch.zeros(total, dtype=torch.int32, device=self._device)
        self._views: dict[str, I32] = {}
        self._tensors: dict[str, Tensor] = {}
        start = 0
        for name, size in sizes.items():
            self._views[name] = self._host[start : start + size].numpy()
            self._tensors[name] = self._plan[start : start + size]
            start += size
        self._uploaded = torch.cuda.Event() if on_gpu else None

    def plan(
        self,
        block_tables: I32,
        seq_lens: I32,
        *,
        share: bool = True,
        min_shared_tokens: int = 64,
        min_chunk_tokens: int = 128,
    ) -> None:
        """Plan a step for ``block_tables`` [n, <= max_blocks] and ``seq_lens`` [n] (the new token included)
        and upload it on the current stream."""
        n, blocks = block_tables.shape
        if n > self.max_requests or blocks > self.max_blocks:
            raise ValueError(
                f"block_tables is [{n}, {blocks}], the buffers hold [{self.max_requests}, {self.max_blocks}]"
            )
        if self._uploaded is not None:
            self._uploaded.synchronize()
        views = self._views
        self.num_entries, num_members, self.num_parts = self._planner.plan(
            block_tables,
            seq_lens,
            views["entries"],
            views["members"],
            views["part_begin"],
            group_size=self.num_heads // self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            num_workers=self.num_workers,
            max_rows=MAX_ROWS,
            min_shared_tokens=min_shared_tokens,
            min_chunk_tokens=min_chunk_tokens,
            share=share,
        )
        self.num_sharing = count_sharing(
            views["entries"].reshape(-1, _ENTRY_FIELDS)[: self.num_entries],
            views["members"].reshape(-1, 2)[:num_members],
        )
        views["num_entries"][0] = self.num_entries
        views["part_begin"][n + 1 :] = self.num_parts  # rows past n have no parts
        views["block_tables"].reshape(self.max_requests, self.max_blocks)[:n, :blocks] = block_tables
        self.num_requests = n
        self._plan.copy_(self._host, non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, scale: float
    ) -> None:
        """Launch on the current stream. query and output [n, heads, head_dim]; caches
        [num_blocks, 16, kv_heads, head_dim]; all contiguous, float16 or bfloat16, on this device.

        The kernel launched just before may write the query and blocks of a single request, not a block that
        two requests share: those are read while it still runs."""
        self._check(query, key_cache, value_cache, output)
        self._launch(query, key_cache, value_cache, output, scale)

    def _launch_cuda(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, scale: float
    ) -> None:
        plan = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        self._kernels.shared_prefix_attention(
            query=query.data_ptr(),
            key_cache=key_cache.data_ptr(),
            value_cache=value_cache.data_ptr(),
            output=output.data_ptr(),
            block_tables=plan["block_tables"],
            entries=plan["entries"],
            num_entries=plan["num_entries"],
            members=plan["members"],
            part_begin=plan["part_begin"],
            part_output=self._part_output.data_ptr(),
            part_max_sum=self._part_max_sum.data_ptr(),
            next_work=self._next_work.data_ptr(),
            num_requests=self.num_requests,
            num_blocks=key_cache.shape[0],
            max_blocks=self.max_blocks,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            is_bfloat16=query.dtype == torch.bfloat16,
            softmax_scale=scale,
            stream=torch.cuda.current_stream(self._device).cuda_stream,
        )

    def _launch_triton(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, scale: float
    ) -> None:
        from .shared_prefix_triton import PlanTensors, shared_prefix_attention_triton

        plan = PlanTensors(
            num_entries=self._tensors["num_entries"],
            entries=self._tensors["entries"],
            members=self._tensors["members"],
            part_begin=self._tensors["part_begin"],
            block_tables=self._tensors["block_tables"].view(self.max_requests, self.max_blocks),
            part_output=self._part_output,
            part_max_sum=self._part_max_sum,
        )
        shared_prefix_attention_triton(
            query,
            key_cache,
            value_cache,
            output,
            plan,
            scale,
            max_rows=MAX_ROWS,
            num_workers=self.num_workers,
        )

    def _check(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor) -> None:
        rows = (self.num_requests, self.num_heads, self.head_dim)
        cache = (key_cache.shape[0], BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        expected = {
            "query": (query, rows),
            "output": (output, rows),
            "key_cache": (key_cache, cache),
            "value_cache": (value_cache, cache),
        }
        for name, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {shape}")
            if tensor.dtype != query.dtype or tensor.dtype not in self._dtypes:
                expected_dtypes = " or ".join(map(str, self._dtypes))
                raise ValueError(
                    f"{name} is {tensor.dtype}, expected {expected_dtypes} as query ({query.dtype})"
                )
            if tensor.device != self._device or not tensor.is_contiguous():
                raise ValueError(f"{name} is on {tensor.device} or not contiguous; expected {self._device}")
