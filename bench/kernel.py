"""Shared-prefix decode attention on the GPU: time over the memory floor, on the grid of docs/attention.md.

Needs the package with its CUDA module, and torch; no model, no manager. Each row rotates over copies of the
KV cache that together exceed the L2 cache, pages are shuffled, and times are medians of CUDA-graph replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from typing import Any

import numpy as np
import torch

from parrot.kernels.shared_prefix import (
    Implementation,
    SharedPrefixAttention,
    shared_prefix_attention_reference,
)

BANDWIDTH = 4.2e12  # bytes/s that the floor assumes
MATRIX_RATE = 790e12  # FLOP/s that the floor assumes
BLOCK = 16
SCALE = 128**-0.5


# A tree of prefixes: (tokens of a node, what is below it: a number of requests or another such tree).
Tree = tuple[tuple[int, "int | Tree"], ...]


@dataclass(frozen=True)
class Row:
    """A decode batch: a tree of prefixes and each request's own tokens."""

    heads: int
    kv_heads: int
    tree: Tree
    suffix: int
    shape: str
    peer_us: float | None = None  # best stored peer on one H200

    @property
    def name(self) -> str:
        return f"{self.heads}/{self.kv_heads} {self.shape} +{self.suffix}"


def _grid() -> list[Row]:
    shapes = [(8, 6000, 256), (16, 6000, 256), (32, 6000, 256), (64, 6000, 256), (64, 2000, 256)]
    shapes += [(128, 6000, 256), (16, 32000, 256), (64, 6000, 1024), (64, 16, 1024)]
    peers = {
        32: [55.5, 70.8, 92.9, 130, 115, 244, 172, 318, 275],
        8: [28.7, 31.2, 43.0, 63.5, 55.4, 101, 59.7, 116, 78.9],
    }
    rows = [
        Row(32, kv, ((prefix, n),), suffix, f"{n}x{prefix}", peers[kv][i])
        for kv in (32, 8)
        for i, (n, prefix, suffix) in enumerate(shapes)
    ]
    unequal = tuple((512 * (1 + i), i + 1) for i in range(16))
    deep = ((3072, ((1024, ((512, 8),) * 4),) * 2),)
    for kv in (32, 8):
        rows.append(Row(32, kv, ((6000, 16),) * 4, 256, "4 groups of 16x6000"))
        rows.append(Row(32, kv, unequal, 256, "16 unequal groups"))
        rows.append(Row(32, kv, deep, 256, "64 on 3072, 2x1024, 8x512"))
    return rows


def _requests(tree: Tree, above: list[int], suffix: int, blocks: Iterator[int]) -> Iterator[list[int]]:
    """The blocks of each request; ``blocks`` yields unused ones."""
    for tokens, below in tree:
        node = above + [next(blocks) for _ in range(tokens // BLOCK)]
        if isinstance(below, int):
            for _ in range(below):
                yield node + [next(blocks) for _ in range(-(-suffix // BLOCK))]
        else:
            yield from _requests(below, node, suffix, blocks)


class Problem:
    """The tensors of one row: a random batch and enough cache copies to defeat the L2."""

    def __init__(self, row: Row, dtype: torch.dtype, min_bytes: int = 400_000_000) -> None:
        rng = np.random.default_rng(0)
        paths = list(_requests(row.tree, [], row.suffix, count()))
        own = -(-row.suffix // BLOCK)
        lens = [(len(path) - own) * BLOCK + row.suffix for path in paths]
        next_block = max(map(max, paths)) + 1
        order = rng.permutation(next_block).astype(np.int32)
        self.block_tables = np.full((len(paths), max(map(len, paths))), -1, dtype=np.int32)
        for i, path in enumerate(paths):
            self.block_tables[i, : len(path)] = order[path]
        self.seq_lens = np.array(lens, dtype=np.int32)
        shape = (next_block, BLOCK, row.kv_heads, 128)
        copy_bytes = 2 * 2 * next_block * BLOCK * row.kv_heads * 128
        copies = max(2, -(-min_bytes // copy_bytes))
        self.caches = [
            tuple(torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2)) for _ in range(copies)
        ]
        self.query = torch.randn(len(paths), row.heads, 128, device="cuda", dtype=dtype)
        self.output = torch.full_like(self.query, float("nan"))
        n, hq = len(paths), row.heads
        tokens = (next_block - n * own) * BLOCK + n * row.suffix
        self.bytes = 4 * tokens * row.kv_heads * 128 + 2 * 2 * n * hq * 128
        self.flops = 4 * int(self.seq_lens.sum()) * hq * 128
        self.floor_us = 1e6 * max(self.bytes / BANDWIDTH, self.flops / MATRIX_RATE)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB on the device: stored rows of peers hold where
    it agrees with theirs."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2e6 * source.numel() / time_graph([lambda: target.copy_(source)], 10)


def time_graph(launches: list[Any], repeats: int) -> float:
    """Median microseconds of one launch, over replays of a graph of all of them, again and again up to 16."""
    launches = launches * -(-16 // len(launches))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the plan's upload and the data come from another stream
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(launches))
    return float(statistics.median(times))


def _make_kernel(row: Row, problem: Problem, implementation: Implementation) -> SharedPrefixAttention:
    n, blocks = problem.block_tables.shape
    kernel = SharedPrefixAttention(
        max_requests=n,
        max_blocks=blocks,
        num_heads=row.heads,
        num_kv_heads=row.kv_heads,
        head_dim=128,
        device=torch.device("cuda", torch.cuda.current_device()),
        implementation=implementation,
    )
    kernel.plan(problem.block_tables, problem.seq_lens)
    return kernel


def _time(kernel: SharedPrefixAttention, problem: Problem, repeats: int) -> float:
    def launch(keys: torch.Tensor, values: torch.Tensor) -> Any:
        return lambda: kernel(problem.query, keys, values, problem.output, SCALE)

    return time_graph([launch(keys, values) for keys, values in problem.caches], repeats)


def measure(row: Row, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Time, error and floor of one row, and the time of the Triton twin where Triton is."""
    problem = Problem(row, dtype)
    kernel = _make_kernel(row, problem, "cuda")
    plan_us = []
    for _ in range(20):
        start = time.perf_counter()
        kernel.plan(problem.block_tables, problem.seq_lens)
        plan_us.append(1e6 * (time.perf_counter() - start))
    time_us = _time(kernel, problem, repeats)
    keys, values = problem.caches[-1]
    reference = shared_prefix_attention_reference(
        problem.query.double(),
        keys,
        values,
        torch.from_numpy(problem.block_tables).cuda(),
        problem.seq_lens.tolist(),
        SCALE,
    )
    error = ((problem.output.double() - reference).norm() / reference.norm()).item()
    triton_us = None
    if find_spec("triton"):
        triton_us = round(_time(_make_kernel(row, problem, "triton"), problem, repeats), 2)
    return {
        "row": row.name,
        "us": round(time_us, 2),
        "floor_us": round(problem.floor_us, 2),
        "over_floor": round(time_us / problem.floor_us, 3),
        "peer_us": row.peer_us,
        "triton_us": triton_us,
        "error": float(f"{error:.2e}"),
        "plan_us": round(statistics.median(plan_us), 1),
        "entries": kernel.num_entries,
        "parts": kernel.num_parts,
    }


def run(quick: bool) -> dict[str, Any]:
    """All rows; prints a table."""
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s (read and written)", flush=True)
    rows = []
    for row in _grid():
        result = measure(row, torch.float16, 10 if quick else 30)
        rows.append(result)
        peer, twin = (f"{result[k]:8.1f}" if result[k] else "       -" for k in ("peer_us", "triton_us"))
        print(
            f"{result['row']:<34}{result['us']:9.1f} us  floor {result['floor_us']:7.1f}"
            f"  x{result['over_floor']:5.2f}"
            f"  best peer {peer}  Triton {twin}  plan {result['plan_us']:6.1f} us"
            f"  error {result['error']:.1e}",
            flush=True,
        )
        torch.cuda.empty_cache()
    prefixed = [r["over_floor"] for r in rows if r["peer_us"] and "x16 " not in r["row"]]
    mean = float(np.exp(np.mean(np.log(prefixed))))
    print(f"geometric mean over the floor, {len(prefixed)} rows with a prefix: {mean:.3f}")
    return {
        "device": torch.cuda.get_device_name(),
        "copy_bandwidth": round(bandwidth),
        "rows": rows,
        "geometric_mean_over_floor": round(mean, 3),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; the last line is ``RESULT`` and JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench kernel", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    result = run(options.quick)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
    print("RESULT", json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
