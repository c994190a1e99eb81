"""The torch side of the CPU attention: tensors in, tensors out, and its twin beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.attention_case import UNUSED, Case, Tree

from parrot.kernels.attention import paged_attention, plan_attention
from parrot.kernels.cpu_attention import CpuAttention, pack_blocks

MIXED = Tree([340, 25, 310, 60, 305], [1, 25, 1, 9, 1], [(-1, 0), (-1, 0), (0, 288), (-1, 0), (2, 288)])
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def tensors(case: Case) -> list[torch.Tensor]:
    """Queries, keys and values, a token beside the other."""
    arrays = [case.query, case.keys, case.values]
    if case.dtype == "bfloat16":
        return [torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for array in arrays]
    return [torch.from_numpy(array) for array in arrays]


def make(dtype: torch.dtype) -> tuple[Case, CpuAttention, list[torch.Tensor]]:
    case = Case(MIXED, 6, 2, 64, str(dtype).removeprefix("torch."))
    attention = CpuAttention(6, 2, 64, dtype)
    attention.plan(case.query_start, case.seq_lens, case.tables, case.num_blocks)
    query, keys, values = tensors(case)
    return case, attention, [query, *pack_blocks(keys, values)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_attention_written_out_and_its_twin(dtype: torch.dtype) -> None:
    case, attention, (query, keys, values) = make(dtype)
    out = attention(query, keys, values, scale=case.scale)
    expected = torch.from_numpy(case.expected())
    assert (out.double() - expected).norm() / expected.norm() < DTYPES[dtype]
    tables = torch.from_numpy(np.where(case.tables == UNUSED, -1, case.tables)).long()
    twin_plan = plan_attention(case.query_start.tolist(), case.seq_lens.tolist(), tables, 3, dtype)
    twin = paged_attention(*tensors(case), twin_plan)
    assert (out.double() - twin.double()).norm() / expected.norm() < 2 * DTYPES[dtype]


def test_lists_and_int64_tables_will_do() -> None:
    case, attention, (query, keys, values) = make(torch.float32)
    expected = attention(query, keys, values, scale=case.scale)
    tables = torch.from_numpy(case.tables).long()
    tables[tables == UNUSED] = 2**40
    attention.plan(case.query_start.tolist(), case.seq_lens.tolist(), tables, case.num_blocks, share=False)
    out = torch.full_like(query, torch.nan)
    assert attention(query, keys, values, out, scale=case.scale) is out
    assert torch.allclose(out, expected, rtol=1e-4, atol=1e-5)
    tables[0, 0] = 2**32
    with pytest.raises(ValueError, match=r"block_tables\[0, 0\] = 2147483647 is outside"):
        attention.plan(case.query_start.tolist(), case.seq_lens.tolist(), tables, case.num_blocks)


def test_rows_within_a_fused_projection_are_read_in_place() -> None:
    case, attention, (query, keys, values) = make(torch.bfloat16)
    expected = attention(query, keys, values, scale=case.scale)
    fused = torch.full((len(query), 10, 64), torch.nan, dtype=torch.bfloat16)
    fused[:, :6] = query
    assert torch.equal(attention(fused[:, :6], keys, values, scale=case.scale), expected)


def test_tensors_that_do_not_fit_are_named() -> None:
    case, attention, (query, keys, values) = make(torch.float32)
    with pytest.raises(ValueError, match=r"query is torch\.bfloat16 on cpu, expected torch\.float32"):
        attention(query.bfloat16(), keys, values, scale=case.scale)
    with pytest.raises(ValueError, match="k_cache has shape"):
        attention(query, keys[:-1], values, scale=case.scale)
    with pytest.raises(ValueError, match=r"v_cache has strides .* axis 3"):
        attention(query, keys, values.transpose(2, 3).contiguous().transpose(2, 3), scale=case.scale)
    with pytest.raises(ValueError, match=r"dtype is torch\.float16"):
        CpuAttention(6, 2, 64, torch.float16)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "device", "supported"),
    [
        (64, torch.float32, "cpu", True),
        (80, torch.bfloat16, "cpu", True),
        (24, torch.float32, "cpu", False),
        (1024, torch.float32, "cpu", False),
        (64, torch.float16, "cpu", False),
        (64, torch.float32, "cuda", False),
    ],
)
def test_what_is_supported_can_be_asked(
    head_dim: int, dtype: torch.dtype, device: str, supported: bool
) -> None:
    assert CpuAttention.supports(head_dim, dtype, torch.device(device)) is supported
