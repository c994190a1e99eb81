"""Products of few rows against float64: in Triton's interpreter on a machine without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpreterBuilder

from parrot.kernels.triton_linear import MAX_ROWS, FewRowProducts, goes_by_row, rows_tiling

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
# The interpreter multiplies no matrices of bfloat16.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32, torch.float16]
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """What is multiplied, and what belongs to the product."""

    size: int  # of the result
    depth: int
    bias: bool = False
    norm: bool = False
    gated: bool = False
    added: bool = False

    def tensors(self, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Rows, weight, bias, gain and what is added to; behind the rows and the weight stands NaN."""
        generator = torch.Generator().manual_seed(self.size + self.depth)
        height = 2 * self.size if self.gated else self.size

        def draw(count: int, *shape: int) -> Tensor:
            values = torch.randn(count + MAX_ROWS, *shape, generator=generator)
            values[count:] = nan
            return values.to(DEVICE, dtype)[:count]

        x, weight = draw(num_rows, self.depth), draw(height, self.depth)
        weight *= self.depth**-0.5
        return x, weight, draw(height), draw(self.depth), draw(num_rows, self.size)

    def expected(self, x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, added: Tensor) -> Tensor:
        """In float64."""
        y = x.double()
        if self.norm:
            y = F.rms_norm(y, y.shape[1:], gain.double(), EPS)
        y = F.linear(y, weight.double(), bias.double() if self.bias else None)
        if self.gated:
            gate, up = y.chunk(2, dim=1)
            y = F.silu(gate) * up
        return y + added.double() if self.added else y

    def compute(
        self, products: FewRowProducts, x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, added: Tensor
    ) -> Tensor:
        return products(
            x,
            weight,
            bias if self.bias else None,
            norm=(gain, EPS) if self.norm else None,
            gated=self.gated,
            added_to=added.clone() if self.added else None,
        )


CASES = [
    Case(130, 256),
    Case(1, 16, norm=True),
    Case(65, 100, bias=True, norm=True),
    Case(101, 2100, bias=True, added=True),
    Case(64, 8200, added=True),
    Case(33, 1104, norm=True, gated=True),
    Case(70, 304, bias=True, norm=True, gated=True),
    Case(5, 4224, bias=True, gated=True),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_float64(case: Case, num_rows: int, dtype: torch.dtype) -> None:
    tensors = case.tensors(num_rows, dtype)
    expected, products = case.expected(*tensors), FewRowProducts(DEVICE)
    first = case.compute(products, *tensors)
    assert first.shape == (num_rows, case.size)
    assert first.dtype == dtype
    error = (first.double() - expected).norm() / expected.norm()
    assert error <= TOLERANCES[dtype]
    assert torch.equal(case.compute(products, *tensors), first)  # counters are zero again


@pytest.mark.skipif(DEVICE.type == "cuda", reason="watches loads in Triton's interpreter")
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_behind_rows_weight_and_bias_is_read(
    case: Case, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are seldom whole tiles. What is read too much is not stored, so that no result shows it."""
    read: list[npt.NDArray[np.uint64]] = []
    load = InterpreterBuilder.create_masked_load

    def watched(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        read.append(pointers.data[mask.data])
        return load(builder, pointers, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)
    tensors = case.tensors(num_rows, DTYPES[0])
    case.compute(FewRowProducts(DEVICE), *tensors)
    addresses = np.concatenate(read)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        end = tensor.data_ptr() + tensor.nbytes
        assert end < storage.data_ptr() + storage.nbytes()
        assert not np.any((end <= addresses) & (addresses < storage.data_ptr() + storage.nbytes()))


@pytest.mark.parametrize("case", CASES[2:5], ids=str)
def test_a_row_is_the_same_whatever_the_others_are(case: Case) -> None:
    x, weight, bias, gain, added = case.tensors(9, DTYPES[-1])
    products = FewRowProducts(DEVICE)
    expected = case.compute(products, x, weight, bias, gain, added)
    x[[0, 3, 8]] = nan
    added[2] = nan
    found = case.compute(products, x, weight, bias, gain, added)
    kept = [1, 4, 5, 6, 7]
    assert torch.equal(found[kept], expected[kept])
    assert found[[0, 3, 8]].isnan().all()


@pytest.mark.parametrize("case", CASES[2:5], ids=str)
def test_what_is_added_to_is_returned_and_nothing_behind_it_written(case: Case) -> None:
    x, weight, *_ = case.tensors(3, DTYPES[0])
    for num_rows in (1, 3):
        buffer = torch.full((MAX_ROWS, case.size), 7.0, device=DEVICE, dtype=x.dtype)
        out = FewRowProducts(DEVICE)(x[:num_rows], weight, added_to=buffer[:num_rows])
        assert out.data_ptr() == buffer.data_ptr()
        assert (buffer[num_rows:] == 7.0).all()


def test_a_single_row_can_take_the_kernel_for_several() -> None:
    assert [depth for depth in (1024, 4096, 5120, 11008, 13824) if not goes_by_row(depth)] == [5120]
    case = Case(70, 5120, norm=True, gated=True)
    tensors = case.tensors(1, DTYPES[0])
    x, weight, _, gain, _ = tensors
    got = FewRowProducts(DEVICE)(x, weight, norm=(gain, EPS), gated=True)
    error = (got.double() - case.expected(*tensors)).norm() / case.expected(*tensors).norm()
    assert error <= TOLERANCES[DTYPES[0]]


def test_sums_are_cut_where_they_are_long_and_tiles_are_few() -> None:
    assert rows_tiling(64, 4096, 2) == (2, 4)
    assert rows_tiling(64, 11008, 2) == (4, 4)
    assert rows_tiling(64, 1024, 2) == (1, 4)
    assert rows_tiling(16, 3072, 2) == (4, 4)
    assert rows_tiling(344, 4096, 2) == (1, 3)  # all at once with three stages
    assert rows_tiling(448, 4096, 2) == (1, 4)  # not at once in any way
    assert rows_tiling(344, 4096, 4) == (1, 2)
    assert all(32 * tiles > 131_072 or rows_tiling(tiles, 131_072, 2)[0] > 1 for tiles in (1, 4096, 4097))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_chain_of_products_replays_the_same(num_rows: int) -> None:
    """Each product starts while the one ahead runs, and they share the counters of cut sums."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).mul_(0.02).to(torch.float16)

    ups, downs = [draw(2 * 1536, 512) for _ in range(24)], [draw(512, 1536) for _ in range(24)]
    first, gain = draw(num_rows, 512), draw(512) + 1
    x, products = first.clone(), FewRowProducts(DEVICE)

    def compute() -> None:
        x.copy_(first)
        for up, down in zip(ups, downs, strict=True):
            products(products(x, up, norm=(gain, EPS), gated=True), down, added_to=x)

    compute()
    expected = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    for _ in range(50):
        x.fill_(nan)
        graph.replay()
        assert torch.equal(x, expected)
    reference = first.double()
    for up, down in zip(ups, downs, strict=True):
        gate, linear = F.linear(F.rms_norm(reference, (512,), gain.double(), EPS), up.double()).chunk(2, 1)
        reference += F.linear(F.silu(gate) * linear, down.double())
    assert (x - reference).norm() <= 5e-3 * reference.norm()  # x was rounded 24 times
