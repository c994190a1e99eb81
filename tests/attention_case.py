"""Steps of paged attention in numpy: shuffled pages, poison wherever nobody should look, and a float64
reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from parrot import _core

BLOCK = 16
UNUSED = 2**31 - 1  # in block tables past the end of a sequence
Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.floating]


@dataclass
class Tree:
    """Sequences by the blocks of a path: ``prefix`` tokens (a multiple of 16) of ``parent`` come first."""

    lengths: list[int]  # of each sequence, this step's rows included
    rows: list[int]  # of each sequence in the step
    parents: list[tuple[int, int]] = field(
        default_factory=list
    )  # (sequence before it, tokens), (-1, 0): none


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def widened(values: Array) -> npt.NDArray[np.float64]:
    """float64 of an array of float32, or of bfloat16 kept as uint16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def view(array: Array) -> _core.TensorView:
    """What the native call takes for a tensor."""
    strides = [stride // array.itemsize for stride in array.strides]
    return _core.TensorView(array.ctypes.data, array.shape, strides)


def packed(cache: Array, values: bool = False) -> Array:
    """Blocks [n, 16, kv_heads, head_dim] as csrc/kernels/cpu/kv_block.h orders them; the shape stays."""
    blocks, tokens, heads, size = cache.shape
    pair = 4 // cache.itemsize
    if values:
        words = cache.reshape(blocks, tokens // pair, pair, heads, size).transpose(0, 3, 1, 4, 2)
    else:
        words = cache.reshape(blocks, tokens, heads, size // pair, pair).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(words).reshape(cache.shape)


class Case:
    """The arrays of one step. Slots that no sequence owns hold NaN, table entries past an end ``UNUSED``."""

    def __init__(
        self, tree: Tree, heads: int, kv_heads: int, head_dim: int, dtype: str, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, dtype
        parents = tree.parents or [(-1, 0)] * len(tree.lengths)
        counts = [-(-length // BLOCK) for length in tree.lengths]
        pages = rng.permutation(sum(counts) + 3).tolist()
        self.num_blocks = len(pages)
        cache = np.full((2, self.num_blocks, BLOCK, kv_heads, head_dim), np.nan, dtype=np.float32)
        self.tables = np.full((len(counts), max(counts) + 1), UNUSED, dtype=np.int32)
        for i, (length, count, (parent, shared)) in enumerate(
            zip(tree.lengths, counts, parents, strict=True)
        ):
            self.tables[i, : shared // BLOCK] = self.tables[parent, : shared // BLOCK]
            for j in range(shared // BLOCK, count):
                page, used = pages.pop(), min(BLOCK, length - j * BLOCK)
                self.tables[i, j] = page
                cache[:, page, :used] = rng.standard_normal((2, used, kv_heads, head_dim))
        self.seq_lens = np.array(tree.lengths, dtype=np.int32)
        self.query_start = np.cumsum([0, *tree.rows], dtype=np.int32)
        query = 2 * rng.standard_normal((self.query_start[-1], heads, head_dim)).astype(np.float32)
        convert = to_bfloat16 if dtype == "bfloat16" else np.ascontiguousarray
        self.query, self.keys, self.values = convert(query), convert(cache[0]), convert(cache[1])
        self.scale = head_dim**-0.5
        self._expected: npt.NDArray[np.float64] | None = None

    def attention(self, **options: object) -> _core.CpuAttention:
        attention = _core.CpuAttention(self.heads, self.kv_heads, self.head_dim, self.dtype)
        attention.plan(self.query_start, self.seq_lens, self.tables, self.num_blocks, **options)  # type: ignore[arg-type]
        return attention

    def run(self, **options: object) -> Array:
        """Output of the native attention, into an array filled with NaN."""
        output = to_bfloat16(np.full(self.query.shape, np.nan)) if self.dtype == "bfloat16" else None
        output = np.full(self.query.shape, np.nan, dtype=np.float32) if output is None else output
        self.call(self.attention(**options), output)
        return output

    def call(self, attention: _core.CpuAttention, output: Array) -> None:
        """One run of what was planned."""
        self.call_with(attention, view(self.query), view(output))

    def call_with(
        self, attention: _core.CpuAttention, query: _core.TensorView, output: _core.TensorView
    ) -> None:
        """The same for queries and outputs that the caller describes."""
        keys, values = packed(self.keys), packed(self.values, values=True)
        attention.run(query, view(keys), view(values), output, self.scale)

    def expected(self) -> npt.NDArray[np.float64]:
        """Attention written out, one sequence at a time; computed once."""
        if self._expected is None:
            self._expected = self._written_out()
        return self._expected

    def _written_out(self) -> npt.NDArray[np.float64]:
        query, outputs = widened(self.query), []
        for i, length in enumerate(self.seq_lens.tolist()):
            start, end = self.query_start[i], self.query_start[i + 1]
            blocks = self.tables[i, : -(-length // BLOCK)]
            keys, values = (
                np.repeat(
                    widened(cache[blocks]).reshape(-1, self.kv_heads, self.head_dim)[:length], self.group, 1
                )
                for cache in (self.keys, self.values)
            )
            scores = np.einsum("rhd,thd->hrt", query[start:end], keys) * self.scale
            hidden = np.arange(length) > length - (end - start) + np.arange(end - start)[:, None]
            scores = np.where(hidden, -np.inf, scores)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            outputs.append(np.einsum("hrt,thd->rhd", weights, values))
        return np.concatenate(outputs)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def error(self, output: Array) -> float:
        """Relative Frobenius error; NaN if any element was not written."""
        expected = self.expected()
        return float(np.linalg.norm(widened(output) - expected) / np.linalg.norm(expected))
