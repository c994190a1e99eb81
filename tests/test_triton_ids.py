"""Ids on a GPU: the likeliest of a row, and ids of the step before in a step's rows; in Triton's interpreter
on a machine without a GPU."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from parrot.kernels.ops import known_ids
from parrot.kernels.triton_ids import likeliest_of_rows, put_known_ids

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 1), (3, 31), (2, 4097), (5, 70_001)])
def test_the_likeliest_of_each_row(num_rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(DEVICE, dtype)
    found = likeliest_of_rows(logits)
    assert found.dtype == torch.int64
    assert found.tolist() == [row.index(max(row)) for row in logits.tolist()]  # the lowest of equal ones


@pytest.mark.parametrize(("first", "second"), [(3, 4), (100, 4000), (0, 69_999), (2047, 2048)])
def test_of_equal_ones_the_lowest(first: int, second: int) -> None:
    logits = torch.full((2, 70_000), -3.0, device=DEVICE)
    logits[1, [first, second]] = -1.0
    assert likeliest_of_rows(logits).tolist() == [0, first]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2048, 39_999])
def test_a_row_that_is_not_finite_has_none(place: int, value: float) -> None:
    logits = torch.zeros(3, 40_000, device=DEVICE)
    logits[:, 77] = 1.0
    logits[1, place] = value
    assert likeliest_of_rows(logits).tolist() == [77, -1, 77]


def test_no_rows_have_no_ids() -> None:
    assert likeliest_of_rows(torch.zeros(0, 5, device=DEVICE)).tolist() == []


@pytest.mark.parametrize("num_rows", [1, 5, 1025])
def test_ids_of_the_step_before_are_put_in_place(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    token_ids = torch.randint(-4, 30_000, (num_rows,), generator=generator, dtype=torch.int32)
    late = torch.tensor([-2, -3, -4, -1], dtype=torch.int32)[:num_rows]  # -3 is of a row that has no id
    token_ids[-len(late) :] = late
    token_ids = token_ids.to(DEVICE)
    previous_ids = torch.tensor([11, 22, -1, 150_000], device=DEVICE)
    expected = known_ids(token_ids, previous_ids)
    put_known_ids(token_ids, previous_ids)
    assert token_ids.tolist() == expected.tolist()
