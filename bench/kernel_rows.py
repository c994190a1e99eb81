"""The rows of ``python -m bench kernel``: decode batches on trees of prefixes, what they must cost at least,
and their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

I32 = npt.NDArray[np.int32]
BANDWIDTH = 4.2e12  # bytes/s that the floor assumes
MATRIX_RATE = 790e12  # FLOP/s that the floor assumes
BLOCK = 16
HEAD_DIM = 128
TILE = 64  # tokens that the kernel works on at once, and its query rows

# A tree of prefixes: (tokens of a node, what is below it: a number of requests or another such tree).
Tree = tuple[tuple[int, "int | Tree"], ...]


@dataclass(frozen=True)
class Row:
    """A decode batch: a tree of prefixes and each request's own tokens."""

    part: str
    heads: int
    kv_heads: int
    tree: Tree
    suffix: int
    shape: str

    @property
    def name(self) -> str:
        """As it stands in tables and stored runs."""
        return f"{self.heads}/{self.kv_heads} {self.shape} +{self.suffix}"

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


SHAPES = ((8, 6000, 256), (16, 6000, 256), (32, 6000, 256), (64, 6000, 256), (64, 2000, 256),
          (128, 6000, 256), (16, 32000, 256), (64, 6000, 1024), (64, 16, 1024))  # fmt: skip
HEADS = ((32, 32), (32, 8))


def all_rows() -> list[Row]:
    """The grid of prefixes that all requests share, then several groups, then trees of three levels."""
    rows = [
        Row("grid", heads, kv, ((prefix, n),), suffix, f"{n}x{prefix}")
        for heads, kv in HEADS
        for n, prefix, suffix in SHAPES
    ]
    unequal = tuple((512 * (1 + i), i + 1) for i in range(16))
    wide = ((3072, ((1024, ((512, 8),) * 4),) * 2),)
    uneven = ((4096, ((2048, ((512, 20), (256, 4))), (512, ((1024, 6), (64, 2))))),)
    for heads, kv in HEADS:
        rows.append(Row("groups", heads, kv, ((6000, 16),) * 4, 256, "4 groups of 16x6000"))
        rows.append(Row("groups", heads, kv, unequal, 256, "16 unequal groups"))
    for heads, kv in HEADS:
        rows.append(Row("deep", heads, kv, wide, 256, "64 on 3072, 2x1024, 8x512"))
        rows.append(Row("deep", heads, kv, uneven, 256, "32 on 4096, 2048 or 512, 64-1024"))
    return rows


@dataclass(frozen=True)
class Node:
    """A node of a tree: its blocks, and the slice of the requests below it."""

    blocks: I32
    first: int
    count: int


class Batch:
    """Block tables and lengths of a row, blocks shuffled, and the nodes of its tree by level."""

    def __init__(self, row: Row, seed: int = 0) -> None:
        self.row = row
        self.levels: list[list[Node]] = []
        own_count = -(-row.suffix // BLOCK)
        blocks = count()
        paths = list(self._requests(row.tree, 0, [], blocks, own_count))
        self.num_blocks = next(blocks)
        order = np.random.default_rng(seed).permutation(self.num_blocks).astype(np.int32)
        self.levels = [
            [Node(order[node.blocks], node.first, node.count) for node in level] for level in self.levels
        ]
        self.own = np.stack([order[path[len(path) - own_count :]] for path in paths])
        self.block_tables = np.full((len(paths), max(map(len, paths))), -1, dtype=np.int32)
        for i, path in enumerate(paths):
            self.block_tables[i, : len(path)] = order[path]
        self.seq_lens = np.array([(len(p) - own_count) * BLOCK + row.suffix for p in paths], dtype=np.int32)
        self.tokens = (self.num_blocks - len(paths) * own_count) * BLOCK + len(paths) * row.suffix

    def _requests(
        self, tree: Tree, depth: int, above: list[int], blocks: count[int], own: int
    ) -> Iterator[list[int]]:
        """The blocks of each request, depth first; fills ``levels`` with blocks not yet shuffled."""
        if depth == len(self.levels):
            self.levels.append([])
        for tokens, below in tree:
            mine = [next(blocks) for _ in range(tokens // BLOCK)]
            first = sum(node.count for node in self.levels[depth])
            self.levels[depth].append(Node(np.array(mine, np.int32), first, _count(below)))
            if isinstance(below, int):
                for _ in range(below):
                    yield above + mine + [next(blocks) for _ in range(own)]
            else:
                yield from self._requests(below, depth + 1, above + mine, blocks, own)

    @property
    def num_requests(self) -> int:
        """Rows of the query."""
        return len(self.seq_lens)

    @property
    def bytes(self) -> int:
        """That must move once: K and V of every token, query and output."""
        rows = self.num_requests * self.row.heads
        return 4 * self.tokens * self.row.kv_heads * HEAD_DIM + 2 * 2 * rows * HEAD_DIM

    @property
    def flops(self) -> int:
        """Of both products of every request."""
        return 4 * int(self.seq_lens.sum(dtype=np.int64)) * self.row.heads * HEAD_DIM

    @property
    def floor_us(self) -> float:
        """The larger of what the bytes and what the FLOPs take."""
        return 1e6 * max(self.bytes / BANDWIDTH, self.flops / MATRIX_RATE)


def _count(below: int | Tree) -> int:
    return below if isinstance(below, int) else sum(_count(deeper) for _, deeper in below)


def plan_costs(batch: Batch, entries: I32, num_parts: int) -> dict[str, float]:
    """What a plan moves and multiplies over what it must: every entry's K and V, though a second one of the
    same tokens finds them in the L2, and its parts, written and read; tiles of 64 rows and 64 tokens."""
    row = batch.row
    tokens = (entries[:, 2] - entries[:, 1]).astype(np.int64)
    parts = 2 * num_parts * row.heads * (HEAD_DIM + 2) * 4
    rows = batch.num_requests * row.heads
    moved = 4 * int(tokens.sum()) * row.kv_heads * HEAD_DIM + parts + 2 * 2 * rows * HEAD_DIM
    tiles = int((-(-tokens // TILE)).sum()) * row.kv_heads
    return {
        "bytes_over_floor": round(moved / batch.bytes, 3),
        "flops_over_floor": round(tiles * 4 * TILE * TILE * HEAD_DIM / batch.flops, 3),
    }


class Problem(Batch):
    """The tensors of a row as well: random, with copies of the cache that together defeat the L2."""

    def __init__(
        self, row: Row, dtype: torch.dtype, device: torch.device, min_bytes: int = 400_000_000
    ) -> None:
        super().__init__(row)
        self.device = device
        shape = (self.num_blocks, BLOCK, row.kv_heads, HEAD_DIM)
        copy_bytes = 2 * 2 * self.num_blocks * BLOCK * row.kv_heads * HEAD_DIM
        copies = max(2, -(-min_bytes // copy_bytes))
        self.caches = [
            (torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype))
            for _ in range(copies)
        ]
        self.query = torch.randn(self.num_requests, row.heads, HEAD_DIM, device=device, dtype=dtype)
