"""SharedPrefixAttention: decode attention that reads each shared K/V tile once per batch (paper section 5.3).

:class:`SharedPrefixAttention` owns the fixed-size device buffers of a plan, so that a CUDA graph captured on
one tree of contexts can be replayed on another; :func:`shared_prefix_attention_reference` is its torch twin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from numbers import Integral
from types import NoneType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import _core
from .staging import Staging
from .tensor_checks import (
    check_device,
    check_dtype,
    check_int32,
    check_is_gpu,
    check_scale,
    check_shape,
    check_tensor,
    check_type,
    made_current,
    with_index,
)

I32 = npt.NDArray[np.int32]
Implementation = Literal["cuda", "triton"]
_Launch = Callable[[Tensor, Tensor, Tensor, Tensor, float], None]
BLOCK_SIZE = 16
MAX_ROWS = 64  # query rows of one entry, as the kernel's tile has
_ENTRY_FIELDS = 8
_MAX_PARTS = 8192


@dataclass(frozen=True)
class PlanCosts:
    """What the planner takes an entry to cost besides its tokens, in tokens' worth of a thread block's time:
    the start of one that several requests share, that of a request's own, and each query row
    (csrc/kvcache/attention_plan.h; where the planner's own figures come from: docs/attention.md)."""

    entry_tokens: int
    own_entry_tokens: int
    row_tokens: int


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


class SharedPrefixAttention:
    """The kernel with its plan buffers, for one model shape on one device. ``implementation``: the CUDA
    kernel, or its Triton twin, which needs no nvcc (and runs on the CPU in Triton's interpreter).

    Call :meth:`plan` once per step, then the object once per layer. ``num_blocks``: of the caches, so that
    block ids are checked before a plan is uploaded; without, they are checked at each call. Raises
    ``ValueError`` for shapes, dtypes, strides, alignments, devices or block ids that do not fit, naming the
    argument, its axis and both values; ``TypeError`` for an argument of another type.
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
        max_parts: int = _MAX_PARTS,
        num_blocks: int | None = None,
        implementation: Implementation = "cuda",
        costs: PlanCosts | None = None,
        staging: Staging | None = None,
    ) -> None:
        """``costs``: others than the planner's own. ``staging``: one of the caller's that has
        :meth:`sections` of the same sizes; else its own."""
        _check_types(num_blocks, device, costs, staging)
        _check_sizes(
            max_requests=max_requests,
            max_blocks=max_blocks,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_parts=max_parts,
        )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.max_requests, self.max_blocks = max_requests, max_blocks
        self.num_blocks = num_blocks
        self._costs = {} if costs is None else asdict(costs)
        self._device = with_index(device)
        self._dtypes = [torch.float16, torch.bfloat16] + [torch.float32] * (implementation == "triton")
        self._planner = _core.AttentionPlanner()
        sections = self.sections(max_requests, max_blocks, max_parts)
        if staging is None:
            staging = Staging(sections, device)
        _check_staging(staging, sections, self._device)
        self._staging = staging
        self._part_output = torch.empty(max_parts, num_heads, head_dim, device=device)
        self._part_max_sum = torch.empty(max_parts, num_heads, 2, device=device)
        self._launch, self.num_workers = self._choose(implementation)
        self._next_work = torch.zeros(2, dtype=torch.int32, device=device)
        self.num_requests = self.num_entries = self.num_parts = 0
        self._max_block = -1  # the largest that the plan reads
        self.num_sharing = 0  # requests that read a part of their tokens together with others

    def _choose(self, implementation: Implementation) -> tuple[_Launch, int]:
        """The launch of an implementation, and how many entries it works on at once."""
        if implementation not in get_args(Implementation):
            known = " or ".join(map(repr, get_args(Implementation)))
            raise ValueError(f"implementation is {implementation!r}, expected {known}")
        if implementation == "triton":
            if self.head_dim < 16 or self.head_dim & (self.head_dim - 1):
                raise ValueError(f"head_dim is {self.head_dim}, expected a power of two from 16")
            from .shared_prefix_triton import num_triton_workers

            return self._launch_triton, num_triton_workers(self._device)
        if self.head_dim not in (64, 128):
            raise ValueError(f"head_dim is {self.head_dim}, expected 64 or 128")
        check_is_gpu(self._device)
        from .. import _kernels  # present only where nvcc was found

        self._kernels = _kernels
        with torch.cuda.device(self._device):
            return self._launch_cuda, _kernels.shared_prefix_attention_grid(self.head_dim)

    @staticmethod
    def sections(max_requests: int, max_blocks: int, max_parts: int = _MAX_PARTS) -> dict[str, int]:
        """What a plan takes of a :class:`Staging`, whose last section the tables are to be: only as many rows
        of them go up as there are."""
        return {
            "num_entries": 4,
            "part_begin": max_requests + 1,
            "entries": max_parts * _ENTRY_FIELDS,
            "members": max_parts * 2,
            "block_tables": max_requests * max_blocks,
        }

    @property
    def entries(self) -> I32:
        """The plan's entries [num_entries, 8], until the next plan (csrc/kvcache/attention_plan.h)."""
        return self._staging.host["entries"].reshape(-1, _ENTRY_FIELDS)[: self.num_entries]

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
        self._staging.wait()
        self.write_plan(
            block_tables,
            seq_lens,
            share=share,
            min_shared_tokens=min_shared_tokens,
            min_chunk_tokens=min_chunk_tokens,
        )
        self._staging.upload("block_tables", len(block_tables) * self.max_blocks)

    def write_plan(
        self,
        block_tables: I32,
        seq_lens: I32,
        *,
        num_rows: int | None = None,
        share: bool = True,
        min_shared_tokens: int = 64,
        min_chunk_tokens: int = 128,
    ) -> None:
        """The same without waiting for the staging and without the upload, which are left to its owner.
        ``num_rows`` >= n: rows of the query; those from n on are padding, for which nothing is read and
        nothing is written."""
        self._check_tables(block_tables, seq_lens)
        n, blocks = block_tables.shape
        num_rows = n if num_rows is None else num_rows
        _check_whole("num_rows", num_rows)
        if not n <= num_rows <= self.max_requests:
            raise ValueError(f"num_rows is {num_rows}, expected {n} to {self.max_requests}")
        views = self._staging.host
        num_entries, _, num_parts = self._planner.plan(
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
            **self._costs,
        )
        if self.num_blocks is not None and self._planner.max_block >= self.num_blocks:
            raise ValueError(_name_block(block_tables, seq_lens, self.num_blocks))
        self.num_entries, self.num_parts, self._max_block = num_entries, num_parts, self._planner.max_block
        self.num_sharing = self._planner.num_sharing
        views["num_entries"][0] = self.num_entries
        views["part_begin"][n + 1 :] = self.num_parts  # rows past n have no parts
        views["block_tables"].reshape(self.max_requests, self.max_blocks)[:n, :blocks] = block_tables
        self.num_requests = num_rows

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, scale: float
    ) -> None:
        """Launch on the current stream. query and output [n, heads, head_dim]; caches
        [num_blocks, 16, kv_heads, head_dim]; all contiguous, float16 or bfloat16, on this device.

        The kernel launched just before may write the query and blocks of a single request, not a block that
        two requests share: those are read while it still runs."""
        self._check(query, key_cache, value_cache, output)
        check_scale(scale)
        with made_current(self._device):
            self._launch(query, key_cache, value_cache, output, scale)

    def _launch_cuda(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, scale: float
    ) -> None:
        plan = {name: tensor.data_ptr() for name, tensor in self._staging.device.items()}
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

        tensors = self._staging.device
        plan = PlanTensors(
            num_entries=tensors["num_entries"],
            entries=tensors["entries"],
            members=tensors["members"],
            part_begin=tensors["part_begin"],
            block_tables=tensors["block_tables"].view(self.max_requests, self.max_blocks),
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

    def _check_tables(self, block_tables: I32, seq_lens: I32) -> None:
        check_int32("block_tables", block_tables, 2)
        check_int32("seq_lens", seq_lens, 1)
        for axis, room in enumerate((self.max_requests, self.max_blocks)):
            size = block_tables.shape[axis]
            if size > room:
                raise ValueError(f"block_tables axis {axis} is {size}, expected at most {room}")
        if len(seq_lens) != len(block_tables):
            raise ValueError(f"seq_lens axis 0 is {len(seq_lens)}, expected {len(block_tables)}")

    def _check(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor) -> None:
        rows = (self.num_requests, self.num_heads, self.head_dim)
        check_dtype("query", query, self._dtypes)
        check_type("key_cache", key_cache, Tensor, "torch.Tensor")
        num_blocks = self.num_blocks
        if num_blocks is None:
            num_blocks = key_cache.shape[0] if key_cache.dim() else 0
        cache = (num_blocks, BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        for name, tensor, shape in (
            ("query", query, rows),
            ("output", output, rows),
            ("key_cache", key_cache, cache),
            ("value_cache", value_cache, cache),
        ):
            check_tensor(name, tensor, shape, query.dtype, self._device)
        if self._max_block >= num_blocks:
            raise ValueError(
                f"key_cache axis 0 is {num_blocks}, expected at least {self._max_block + 1}: "
                f"block_tables name block {self._max_block}"
            )


def _check_types(
    num_blocks: int | None, device: torch.device, costs: PlanCosts | None, staging: Staging | None
) -> None:
    if num_blocks is not None:
        _check_size("num_blocks", num_blocks)
    for name, value, kinds, expected in (
        ("device", device, torch.device, "torch.device"),
        ("costs", costs, (PlanCosts, NoneType), "PlanCosts or None"),
        ("staging", staging, (Staging, NoneType), "Staging or None"),
    ):
        check_type(name, value, kinds, expected)
    for name, cost in ({} if costs is None else asdict(costs)).items():
        _check_whole(f"costs.{name}", cost)


def _check_staging(staging: Staging, sections: dict[str, int], device: torch.device) -> None:
    for name, size in sections.items():
        if name not in staging.device:
            raise ValueError(f"staging has no section {name!r}, expected one of {size} elements")
        check_shape(f"staging section {name!r}", staging.device[name], (size,))
        check_device(f"staging section {name!r}", staging.device[name], device)


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is of type {type(value).__name__}, expected a whole number")


def _check_size(name: str, size: int) -> None:
    _check_whole(name, size)
    if size < 1:
        raise ValueError(f"{name} is {size}, expected at least 1")


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        _check_size(name, size)
    heads, kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
    if heads % kv_heads or heads // kv_heads > MAX_ROWS:
        raise ValueError(
            f"num_heads is {heads}, expected 1 to {MAX_ROWS} times num_kv_heads, which is {kv_heads}"
        )


def _name_block(block_tables: I32, seq_lens: I32, num_blocks: int) -> str:
    """The first block of a plan that a cache of ``num_blocks`` does not have."""
    is_used = np.arange(block_tables.shape[1]) * BLOCK_SIZE < seq_lens[:, None]
    request, index = np.argwhere(is_used & (block_tables >= num_blocks))[0]
    block = block_tables[request, index]
    return f"block_tables[{request}, {index}] is {block}, expected below num_blocks = {num_blocks}"
