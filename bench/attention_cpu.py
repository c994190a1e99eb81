"""Attention on the CPU: one layer against what this machine reads and multiplies, and beside the torch path.

The model shape is that of SmolLM2-135M (9 query heads on 3 KV heads of size 64), bfloat16. Each row walks
over copies of its KV cache that together exceed the CPU's, as the layers of an engine do; pages are shuffled.
In every repeat the variants and the reading of the same memory take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parrot import _core
from parrot.engine.batch import host_zeros
from parrot.kernels.attention import paged_attention, plan_attention
from parrot.kernels.cpu_attention import CpuAttention, pack_blocks

from .timing import Spread, print_table, show, spread

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
BLOCK = 16
DTYPE = torch.bfloat16
TOLERANCE = 1.6e-2  # relative, between two paths that each round to bfloat16
I32 = npt.NDArray[np.int32]
Layer = Callable[[int], Tensor]  # attention of one layer of the pool


@dataclass(frozen=True)
class Row:
    """``count`` sequences of ``length`` tokens, ``rows`` of them in this step, with a common prefix."""

    name: str
    count: int
    length: int
    rows: int = 1
    shared: int = 0

    @property
    def flops(self) -> int:
        """Of both products, for the tokens that each row sees."""
        seen = sum(self.length - self.rows + 1 + i for i in range(self.rows))
        return 4 * HEAD_DIM * HEADS * self.count * seen


def _decodes(quick: bool) -> list[Row]:
    sizes = [(b, c) for b in (1, 8, 16) for c in ((1000,) if quick else (300, 1000, 4000))]
    rows = [Row(f"{b} x {c}", b, c) for b, c in sizes]
    return rows + [Row(f"{b} x {c // BLOCK * BLOCK}+50", b, c + 50, 1, c) for b, c in sizes if b > 1]


def _prefills(quick: bool) -> list[Row]:
    rows = [Row("300", 1, 300, 300), Row("1000", 1, 1000, 1000), Row("256 over 1000", 1, 1256, 256)]
    return rows[:1] if quick else [*rows, Row("16 x 50 over 1000", 16, 1050, 50, 1000)]


class Problem:
    """The tensors of one row."""

    def __init__(self, row: Row, pool_bytes: int) -> None:
        rng = np.random.default_rng(0)
        blocks, shared = -(-row.length // BLOCK), row.shared // BLOCK
        self.num_blocks = shared + row.count * (blocks - shared)
        pages = rng.permutation(self.num_blocks).astype(np.int32)
        own = pages[shared:].reshape(row.count, blocks - shared)
        self.tables: I32 = np.concatenate([np.tile(pages[:shared], (row.count, 1)), own], axis=1)
        self.starts = [row.rows * i for i in range(row.count + 1)]
        self.lens = [row.length] * row.count
        self.layer_bytes = 2 * self.num_blocks * BLOCK * KV_HEADS * HEAD_DIM * DTYPE.itemsize
        layers = max(2, pool_bytes // self.layer_bytes)
        shape = (layers, 2, self.num_blocks, BLOCK, KV_HEADS, HEAD_DIM)
        self.pool = host_zeros(shape, DTYPE).normal_()
        self.first = self.pool[0].clone()  # a token beside the other, as torch takes them
        self.pool[0, 0], self.pool[0, 1] = pack_blocks(*self.first)
        self.query = torch.randn(row.count * row.rows, HEADS, HEAD_DIM).to(DTYPE)
        self.out = torch.empty_like(self.query)
        tables = torch.from_numpy(self.tables).long()
        self._torch_plan = plan_attention(self.starts, self.lens, tables, HEADS // KV_HEADS, DTYPE)

    def native(self, share: bool) -> Layer:
        """As an engine calls it, which looks at its cache once and at queries and outputs once a step."""
        attention = CpuAttention(HEADS, KV_HEADS, HEAD_DIM, DTYPE)
        attention.plan(self.starts, self.lens, self.tables, self.num_blocks, share=share)
        query, out = attention.view("query", self.query), attention.view("out", self.out)
        caches = [(attention.view("k", k), attention.view("v", v)) for k, v in self.pool]

        def run(layer: int) -> Tensor:
            keys, values = caches[layer]
            attention.run(query, keys, values, out, scale=HEAD_DIM**-0.5)
            return self.out

        return run

    def torch_path(self) -> Layer:
        """Of which only the time is of use: what it reads is in the order of the native path."""
        return lambda layer: self._by_torch(self.pool[layer])

    def expected(self) -> Tensor:
        """What the native path should make of the first layer."""
        return self._by_torch(self.first)

    def _by_torch(self, cache: Tensor) -> Tensor:
        return paged_attention(self.query, cache[0], cache[1], self._torch_plan)

    def time_layers(self, attention: Layer, seconds: float) -> float:
        """Microseconds of one layer: over all of them, or as many as fit the time."""
        start, done = time.perf_counter(), 0
        for layer in range(len(self.pool)):
            attention(layer)
            done += 1
            if time.perf_counter() - start > seconds:
                break
        return 1e6 * (time.perf_counter() - start) / done


def read_gb_per_s(memory: Tensor, num_threads: int) -> float:
    """How fast this machine reads ``memory``, in GB/s."""
    words = memory.flatten().view(torch.int64).numpy()
    start = time.perf_counter()
    _core.sum_cpu_words(words, num_threads)
    return words.nbytes / 1e9 / (time.perf_counter() - start)


def matmul_gflops() -> float:
    """What torch's fp32 matrix product reaches on its threads: the practical peak of fp32 arithmetic."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * 1024**3 / 1e9 / min(times)


def measure(row: Row, repeats: int, pool_bytes: int, seconds: float) -> dict[str, Any]:
    """Times of one row's variants in microseconds, what they read, and how far they differ."""
    problem = Problem(row, pool_bytes)
    variants = {"native": problem.native(share=True), "torch": problem.torch_path()}
    if row.shared:
        variants["per_request"] = problem.native(share=False)
    expected = problem.expected().float()
    error = ((variants["native"](0).float() - expected).norm() / expected.norm()).item()
    times: dict[str, list[float]] = {name: [] for name in variants}
    reads = []
    for _ in range(repeats):
        reads.append(read_gb_per_s(problem.pool, torch.get_num_threads()))
        for name, attention in variants.items():
            times[name].append(problem.time_layers(attention, seconds))
    spreads = {name: spread(values) for name, values in times.items()}
    used = problem.layer_bytes / 1e3 / spreads["native"]["median"]
    return {
        "row": row.name,
        "threads": torch.get_num_threads(),
        "us": spreads,
        "read_gb_per_s": spread(reads),
        "gb_per_s": float(f"{used:.3g}"),
        "of_bandwidth": float(f"{used / spread(reads)['median']:.3g}"),
        "gflops": float(f"{row.flops / 1e3 / spreads['native']['median']:.3g}"),
        "error": float(f"{error:.2e}"),
    }


def run(quick: bool) -> dict[str, Any]:
    """All rows on one thread and on all; prints two tables."""
    repeats, pool_bytes, seconds = (3, 48 << 20, 0.05) if quick else (7, 384 << 20, 0.5)
    before = torch.get_num_threads()
    results: dict[str, Any] = {"isa": _core.cpu_isa(), "decode": [], "prefill": [], "matmul_gflops": {}}
    try:
        with torch.inference_mode():
            for threads in sorted({1, before}):
                torch.set_num_threads(threads)
                results["matmul_gflops"][str(threads)] = float(f"{matmul_gflops():.4g}")
                for kind, rows in (("decode", _decodes(quick)), ("prefill", _prefills(quick))):
                    results[kind] += [measure(row, repeats, pool_bytes, seconds) for row in rows]
    finally:
        torch.set_num_threads(before)
    _print(results)
    errors = [row["error"] for kind in ("decode", "prefill") for row in results[kind]]
    return {**results, "ok": max(errors) < TOLERANCE}


def _ratio(row: dict[str, Any], other: str) -> str:
    us: dict[str, Spread] = row["us"]
    return f"{us[other]['median'] / us['native']['median']:.3g}x" if other in us else "-"


def _peaks(gflops: dict[str, float]) -> str:
    return ", ".join(
        f"{figure:.0f} GFLOP/s on {count} core{'s' * (count != '1')}" for count, figure in gflops.items()
    )


def _print(results: dict[str, Any]) -> None:
    print_table(
        f"decode, one layer, {results['isa']}, requests x tokens: GB/s of K and V read once, of plain "
        "reading, and the share; how many times as long torch takes, and attention per request",
        ["batch", "cores", "us", "GB/s", "plain", "share", "torch", "per req."],
        [
            (
                *(row["row"], str(row["threads"]), show(row["us"]["native"], 0), f"{row['gb_per_s']:.1f}"),
                *(f"{row['read_gb_per_s']['median']:.1f}", f"{row['of_bandwidth']:.2f}"),
                *(_ratio(row, "torch"), _ratio(row, "per_request")),
            )
            for row in results["decode"]
        ],
    )
    print_table(
        f"prefill, one layer; torch's fp32 matmul reaches {_peaks(results['matmul_gflops'])}; the share "
        "of that, and how many times as long torch's attention takes",
        ["tokens", "cores", "us", "GFLOP/s", "share", "torch"],
        [
            (
                *(row["row"], str(row["threads"]), show(row["us"]["native"], 0), f"{row['gflops']:.0f}"),
                f"{row['gflops'] / results['matmul_gflops'][str(row['threads'])]:.2f}",
                _ratio(row, "torch"),
            )
            for row in results["prefill"]
        ],
    )
