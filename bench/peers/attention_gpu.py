"""Decode attention of FlashInfer and FlashAttention-3 (vLLM's build) as arms of ``python -m bench kernel``.

Planning is not timed. ``cascade`` is FlashInfer's multi-level cascade with the kernels of its own choice (fa3
on Hopper), ``cascade fa2`` the same calls with its fa2 kernels. ``fa3 prefix+suffix`` is what vLLM's cascade
runs: one group; ``fa3 groups`` gives the same calls one sequence per group, which vLLM does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..kernel_rows import BLOCK, HEAD_DIM, I32

if TYPE_CHECKING:
    from ..kernel_rows import Node, Problem

Launch = Callable[[Tensor, Tensor], Tensor]
_WORKSPACE = 256 << 20


class CannotRun(Exception):
    """An arm has no way to run a tree."""


def installed_arms(scale: float) -> Iterator[tuple[str, Callable[[Problem], Launch]]]:
    """The arms of what is installed."""
    if find_spec("flashinfer"):
        yield "paged", lambda problem: _flashinfer_paged(problem, scale)
        yield "cascade", lambda problem: _flashinfer_cascade(problem, scale)
        yield "cascade fa2", lambda problem: _flashinfer_cascade_fa2(problem, scale)
    if find_spec("vllm"):
        yield "fa3", lambda problem: _fa3(problem, scale)
        yield "fa3 prefix+suffix", lambda problem: _fa3_groups(problem, scale, several=False)
        yield "fa3 groups", lambda problem: _fa3_groups(problem, scale, several=True)


def page_lists(rows: list[I32]) -> tuple[I32, I32]:
    """Offsets [n + 1] and the pages of all rows in a row."""
    offsets = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
    return offsets, np.concatenate(rows).astype(np.int32)


def own_pages(problem: Problem) -> list[I32]:
    """Each request's whole path."""
    counts = -(-problem.seq_lens // BLOCK)
    return [row[:count] for row, count in zip(problem.block_tables, counts, strict=True)]


def cascade_levels(problem: Problem) -> list[tuple[I32, list[I32], I32]]:
    """(offsets of the requests, pages, tokens on the last page) of each node, level by level, own tokens
    last. Raises CannotRun when a request has fewer levels than others."""
    n = problem.num_requests
    levels = []
    for nodes in problem.levels:
        if sum(node.count for node in nodes) != n:
            raise CannotRun("requests of different depth")
        offsets = np.cumsum([0] + [node.count for node in nodes]).astype(np.int32)
        levels.append((offsets, [node.blocks for node in nodes], np.full(len(nodes), BLOCK, np.int32)))
    last = np.full(n, (problem.row.suffix - 1) % BLOCK + 1, np.int32)
    levels.append((np.arange(n + 1, dtype=np.int32), list(problem.own), last))
    return levels


def groups_of(problem: Problem, several: bool) -> list[Node]:
    """The groups of a tree of one level; raises CannotRun for others."""
    if len(problem.levels) > 1:
        raise CannotRun("one level of prefixes only")
    if not several and len(problem.levels[0]) > 1:
        raise CannotRun("one group only")
    if several and len(problem.levels[0]) == 1:
        raise CannotRun("one group: see fa3 prefix+suffix")
    return problem.levels[0]


def padded(rows: list[I32]) -> I32:
    """Rows side by side, with 0 past their ends."""
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def _on(problem: Problem, values: I32) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(problem.device)


def _workspace(problem: Problem) -> Tensor:
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=problem.device)


def _shape(problem: Problem) -> tuple[int, int, int, int]:
    """The sizes that a plan of FlashInfer takes, in its order."""
    return problem.row.heads, problem.row.kv_heads, HEAD_DIM, BLOCK


def _flashinfer_paged(problem: Problem, scale: float) -> Launch:
    import flashinfer

    dtype = problem.query.dtype
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(problem), "NHD", use_tensor_cores=True)
    last = ((problem.seq_lens - 1) % BLOCK + 1).astype(np.int32)
    tensors = [_on(problem, values) for values in (*page_lists(own_pages(problem)), last)]
    wrapper.plan(*tensors, *_shape(problem), q_data_type=dtype, kv_data_type=dtype, sm_scale=scale)
    return lambda keys, values: wrapper.run(problem.query, (keys, values))


def _level_tensors(problem: Problem) -> list[list[Tensor]]:
    """What FlashInfer plans each level from: offsets of the requests, of the pages, the pages, and the tokens
    on the last page."""
    return [
        [_on(problem, values) for values in (offsets, *page_lists(pages), last)]
        for offsets, pages, last in cascade_levels(problem)
    ]


def _flashinfer_cascade(problem: Problem, scale: float) -> Launch:
    import flashinfer

    levels = _level_tensors(problem)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(levels), _workspace(problem), "NHD")
    lists = map(list, zip(*levels, strict=True))
    wrapper.plan(*lists, *_shape(problem), q_data_type=problem.query.dtype, sm_scale=scale)
    return lambda keys, values: wrapper.run(problem.query, (keys, values))


def _flashinfer_cascade_fa2(problem: Problem, scale: float) -> Launch:
    """FlashInfer's cascade has no choice of kernels, its wrapper of one level has: one for each level, in the
    cascade's order, with one workspace and its merge."""
    import flashinfer

    *above, own = _level_tensors(problem)
    workspace = _workspace(problem)
    wrappers = []
    for tensors in (own, *above):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(*tensors, *_shape(problem), q_data_type=problem.query.dtype, sm_scale=scale)
        wrappers.append(wrapper)

    def launch(keys: Tensor, values: Tensor) -> Tensor:
        output: Tensor
        output, sums = wrappers[0].run(problem.query, (keys, values), return_lse=True)
        for wrapper in wrappers[1:]:
            part = wrapper.run(problem.query, (keys, values), return_lse=True)
            flashinfer.merge_state_in_place(output, sums, *part)
        return output

    return launch


def _fa3_call(problem: Problem, scale: float, starts: I32, lens: I32, pages: list[I32], causal: bool) -> Any:
    """Keys and values to FA3's result; with the softmax's sums where it is one half of a cascade."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    arguments = {
        "max_seqlen_q": int(np.diff(starts).max()),
        "cu_seqlens_q": _on(problem, starts),
        "max_seqlen_k": int(lens.max()),
        "seqused_k": _on(problem, lens),
        "block_table": _on(problem, padded(pages)),
        "causal": causal,
        "softmax_scale": scale,
        "fa_version": 3,
    }

    def call(keys: Tensor, values: Tensor, **more: bool) -> Any:
        return flash_attn_varlen_func(problem.query, keys, values, **arguments, **more)

    return call


def _fa3(problem: Problem, scale: float) -> Launch:
    starts = np.arange(problem.num_requests + 1, dtype=np.int32)
    call: Launch = _fa3_call(problem, scale, starts, problem.seq_lens, own_pages(problem), True)
    return call


def _vllm_merge() -> Callable[..., None]:
    """The merge that vLLM takes where it has its CUDA library, else its Triton one."""
    with suppress(ImportError):
        import_module("vllm._C_stable_libtorch")
    if hasattr(torch.ops._C, "merge_attn_states"):
        from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
    else:
        from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states
    merge: Callable[..., None] = merge_attn_states
    return merge


def _fa3_groups(problem: Problem, scale: float, several: bool) -> Launch:
    groups = groups_of(problem, several)
    merge = _vllm_merge()
    n = problem.num_requests
    starts = np.cumsum([0] + [group.count for group in groups]).astype(np.int32)
    lens = np.array([len(group.blocks) * BLOCK for group in groups], np.int32)
    prefix = _fa3_call(problem, scale, starts, lens, [group.blocks for group in groups], False)
    own_lens = np.full(n, problem.row.suffix, np.int32)
    suffix = _fa3_call(problem, scale, np.arange(n + 1, dtype=np.int32), own_lens, list(problem.own), True)
    output = torch.empty_like(problem.query)

    def launch(keys: Tensor, values: Tensor) -> Tensor:
        first, first_sums = prefix(keys, values, return_softmax_lse=True)
        second, second_sums = suffix(keys, values, return_softmax_lse=True)
        merge(output, first, first_sums, second, second_sums)
        return output

    return launch
