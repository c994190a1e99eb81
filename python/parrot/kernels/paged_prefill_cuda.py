"""Causal attention of chunks of prefill over a paged cache, by the CUDA kernel, which is for Hopper alone."""

from __future__ import annotations

import torch
from torch import Tensor

from .paged_prefill import BLOCK_SIZE, PrefillPlan
from .tensor_checks import (
    check_axes,
    check_dtype,
    check_is_gpu,
    check_scale,
    check_tensor,
    check_type,
    made_current,
    with_index,
)


class CudaPrefill:
    """Launches the kernel on one device, one stream at a time; plans are made of tiles of ``rows`` rows."""

    def __init__(self, device: torch.device) -> None:
        from .. import _kernels  # present only where nvcc was found

        self.rows = _kernels.paged_prefill_rows()
        self._kernels = _kernels
        self._device = with_index(device)
        check_is_gpu(self._device)
        self._next_work = torch.zeros(1, dtype=torch.int32, device=device)  # every launch leaves it zero

    @staticmethod
    def supports(device: torch.device, head_dim: int) -> bool:
        """Whether the kernel runs there: compute capability 9.0, heads of 64 or 128."""
        if device.type != "cuda" or head_dim not in (64, 128):
            return False
        from .. import _kernels

        with torch.cuda.device(device):
            return _kernels.has_paged_prefill()

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        output: Tensor,
        plan: PrefillPlan,
        scale: float,
    ) -> None:
        """The same as :func:`~parrot.kernels.paged_prefill.paged_prefill`, in float16 or bfloat16. Raises
        ValueError for what does not fit, naming the argument, its axis and both values, and TypeError for an
        argument of another type; what the tiles and the tables say is the caller's to get right."""
        check_arguments(query, key_cache, value_cache, output, plan, self.rows, self._device)
        check_scale(scale)
        with made_current(self._device):
            self._kernels.paged_prefill(
                query=query.data_ptr(),
                key_cache=key_cache.data_ptr(),
                value_cache=value_cache.data_ptr(),
                output=output.data_ptr(),
                tiles=plan.tiles.data_ptr(),
                block_tables=plan.block_tables.data_ptr(),
                next_work=self._next_work.data_ptr(),
                num_rows=query.shape[0],
                num_tiles=len(plan.tiles),
                num_tokens=plan.num_tokens,
                num_blocks=key_cache.shape[0],
                max_blocks=plan.block_tables.stride(0),
                num_heads=query.shape[1],
                num_kv_heads=key_cache.shape[2],
                head_dim=query.shape[2],
                is_bfloat16=query.dtype == torch.bfloat16,
                softmax_scale=scale,
                stream=torch.cuda.current_stream(self._device).cuda_stream,
            )


def check_arguments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    plan: PrefillPlan,
    rows: int,
    device: torch.device,
) -> None:
    """Raise what :meth:`CudaPrefill.__call__` says; ``rows``: of the kernel's tiles."""
    check_dtype("query", query, (torch.float16, torch.bfloat16))
    check_axes("query", query, 3)
    check_axes("key_cache", key_cache, 4)
    cache = (key_cache.shape[0], BLOCK_SIZE, key_cache.shape[2], query.shape[2])
    for name, tensor, shape in (
        ("query", query, query.shape),
        ("output", output, query.shape),
        ("key_cache", key_cache, cache),
        ("value_cache", value_cache, cache),
    ):
        check_tensor(name, tensor, shape, query.dtype, device)
    check_type("plan", plan, PrefillPlan, "PrefillPlan")
    if plan.rows != rows:
        raise ValueError(f"plan.rows is {plan.rows}, expected {rows}")
    check_axes("plan.tiles", plan.tiles, 2)
    check_axes("plan.block_tables", plan.block_tables, 2)
    tiles = (plan.tiles.shape[0], 4)
    check_tensor("plan.tiles", plan.tiles, tiles, torch.int32, device)
    tables = plan.block_tables
    check_tensor("plan.block_tables", tables, tables.shape, torch.int32, device)
