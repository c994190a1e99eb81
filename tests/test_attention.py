"""The reference paged attention against attention written out, in float64, one query at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from parrot.kernels.attention import BLOCK_SIZE, paged_attention, plan_attention

HEAD_DIM = 16


@dataclass
class Case:
    """A step over shuffled pages, with NaN in every slot that no sequence owns."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start: list[int]
    seq_lens: list[int]
    block_tables: Tensor

    def run(self) -> Tensor:
        group_size = self.query.shape[1] // self.k_cache.shape[2]
        plan = plan_attention(
            self.query_start, self.seq_lens, self.block_tables, group_size, self.query.dtype
        )
        return paged_attention(self.query, self.k_cache, self.v_cache, plan)

    def expected(self) -> Tensor:
        """float64 [T, heads, head_dim]."""
        out = torch.empty(self.query.shape, dtype=torch.float64)
        group_size = self.query.shape[1] // self.k_cache.shape[2]
        for i, length in enumerate(self.seq_lens):
            start, end = self.query_start[i], self.query_start[i + 1]
            for row in range(start, end):
                visible = length - (end - 1 - row)
                slots = [(int(self.block_tables[i, t // BLOCK_SIZE]), t % BLOCK_SIZE) for t in range(visible)]
                for head in range(self.query.shape[1]):
                    k = torch.stack([self.k_cache[b, o, head // group_size] for b, o in slots]).double()
                    v = torch.stack([self.v_cache[b, o, head // group_size] for b, o in slots]).double()
                    scores = k @ self.query[row, head].double() / HEAD_DIM**0.5
                    out[row, head] = scores.softmax(0) @ v
        return out


def make_case(
    sequences: list[tuple[int, int]], heads: int, kv_heads: int, dtype: torch.dtype, *, seed: int = 0
) -> Case:
    """``sequences``: (length, rows in this step) of each."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_blocks = [-(-length // BLOCK_SIZE) for length, _ in sequences]
    pages = torch.randperm(sum(num_blocks) + 5, generator=generator).tolist()
    caches = [torch.full((len(pages), BLOCK_SIZE, kv_heads, HEAD_DIM), torch.nan, dtype=dtype) for _ in "kv"]
    tables = torch.full((len(sequences), max(num_blocks) + 2), -1)
    for i, (length, _) in enumerate(sequences):
        for j in range(num_blocks[i]):
            page, used = pages.pop(), min(BLOCK_SIZE, length - j * BLOCK_SIZE)
            tables[i, j] = page
            for cache in caches:
                cache[page, :used] = normal(used, kv_heads, HEAD_DIM)
    query_start = [0]
    for _, rows in sequences:
        query_start.append(query_start[-1] + rows)
    query = 2 * normal(query_start[-1], heads, HEAD_DIM)
    return Case(query, caches[0], caches[1], query_start, [length for length, _ in sequences], tables)


STEPS = {
    "decode": [(1, 1), (15, 1), (16, 1), (17, 1), (90, 1)],
    "decode-unequal": [(1, 1), (300, 1), (2, 1), (120, 1), (3, 1)],
    "first-chunk": [(37, 37), (2, 2)],
    "later-chunk": [(50, 13), (33, 32), (48, 16)],
    "mixed": [(40, 1), (25, 25), (7, 1), (60, 9), (16, 1)],
}


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("step", STEPS)
def test_equals_attention_written_out(step: str, heads: tuple[int, int]) -> None:
    case = make_case(STEPS[step], *heads, torch.float32)
    assert torch.allclose(case.run().double(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_is_fp32_in_half_precision(dtype: torch.dtype) -> None:
    case = make_case(STEPS["mixed"], 6, 2, dtype)
    error = (case.run().double() - case.expected()).norm() / case.expected().norm()
    assert error < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("step", STEPS)
def test_slots_of_nobody_do_not_leak(step: str) -> None:
    case = make_case(STEPS[step], 4, 2, torch.float32)
    assert case.k_cache.isnan().any()
    assert not case.run().isnan().any()


def test_unused_table_entries_are_not_followed() -> None:
    case = make_case(STEPS["mixed"], 4, 2, torch.float32)
    expected = case.run()
    case.block_tables[case.block_tables < 0] = 2**31 - 1
    assert torch.equal(case.run(), expected)


def test_rows_do_not_depend_on_the_rest_of_the_batch() -> None:
    case = make_case(STEPS["mixed"], 4, 2, torch.float32)
    together = case.run()
    for i, length in enumerate(case.seq_lens):
        start, end = case.query_start[i], case.query_start[i + 1]
        alone = Case(
            case.query[start:end],
            case.k_cache,
            case.v_cache,
            [0, end - start],
            [length],
            case.block_tables[i : i + 1],
        )
        assert torch.allclose(alone.run(), together[start:end], rtol=1e-5, atol=1e-6)
