"""Paged prefill against attention in float64, in Triton's interpreter on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)

from parrot.kernels import paged_prefill
from parrot.kernels.paged_prefill import (
    LOW,
    TALL,
    PrefillPlan,
    compile_prefill,
    prefill_tiles,
    tile_rows,
)

BLOCK = 16
HEADS, KV_HEADS = 4, 2
LENGTHS = [2, 63, 64, 65, 129, 200, 17]  # rows of chunks, around the edges of tiles
BEFORE = [0, 5, 63, 64, 16, 127, 130]  # tokens ahead of them
UNUSED = 2**30  # a block that nobody may read


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, before: int) -> torch.Tensor:
    """Causal attention of the rows of a chunk [rows, heads, head_dim] over tokens [n, kv_heads, head_dim]."""
    rows, heads, head_dim = query.shape
    groups = heads // keys.shape[1]
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (keys, values))
    scores = torch.einsum("rhd,thd->hrt", query.double(), keys) * head_dim**-0.5
    is_seen = torch.arange(len(keys))[None, :] <= before + torch.arange(rows)[:, None]
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("hrt,thd->rhd", weights, values)


@pytest.mark.parametrize(
    ("rows", "head_dim", "section", "narrow"),
    [(LOW, 64, 512, 2**31), (TALL, 64, 512, 2**31), (TALL, 24, 1, 2**31), (LOW, 16, 1, 0)],
    ids=["low", "tall", "sections", "wide"],
)
def test_ragged_chunks_equal_attention_in_float64(
    rows: int, head_dim: int, section: int, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks behind a sequence have no number, slots behind its end hold NaN, and the first rows of the
    query belong to nobody."""
    monkeypatch.setattr(paged_prefill, "_SECTION", section)
    monkeypatch.setattr(paged_prefill, "_NARROW", narrow)
    generator = torch.Generator().manual_seed(rows + head_dim)
    ends = [before + length for before, length in zip(BEFORE, LENGTHS, strict=True)]
    start = np.cumsum([3, *LENGTHS]).tolist()
    counts = [-(-end // BLOCK) for end in ends]
    names = torch.randperm(sum(counts) + 1, generator=generator, dtype=torch.int32).split([*counts, 1])
    tables = torch.full((len(ends) + 1, max(counts)), UNUSED, dtype=torch.int32)
    shape = sum(counts) + 1, BLOCK, KV_HEADS, head_dim
    caches = torch.full((2, *shape), torch.nan)
    query = torch.randn(start[-1], HEADS, head_dim, generator=generator)
    expected = torch.full_like(query, 7.0)
    for i, end in enumerate(ends):
        tables[i + 1, : counts[i]] = names[i]
        tokens = torch.randn(2, end, KV_HEADS, head_dim, generator=generator)
        position = torch.arange(end)
        caches[:, names[i].long()[position // BLOCK], position % BLOCK] = tokens
        chunk = slice(start[i], start[i + 1])
        expected[chunk] = reference(query[chunk], tokens[0], tokens[1], BEFORE[i]).float()
    tiles = torch.from_numpy(prefill_tiles(start, ends, range(len(ends)), 1, rows))
    output = torch.full_like(query, 7.0)
    plan = PrefillPlan(tiles, tables, rows, num_tokens=sum(ends))
    paged_prefill.paged_prefill(query, caches[0], caches[1], output, plan, head_dim**-0.5)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "seq_lens", "heads", "expected"),
    [
        ([2048] * 4, [2048] * 4, 32, TALL),
        ([1024], [1024], 32, LOW),  # half of the device would wait for the last tile
        ([1024], [7000], 32, TALL),  # tiles of nearly one length
        ([50] * 64, [6050] * 64, 32, LOW),  # half of each tall tile would be lost
        ([200] * 16, [6200] * 16, 32, TALL),
        ([2048], [2048], 16, LOW),
    ],
)
def test_tiles_are_tall_where_that_is_faster(
    lengths: list[int], seq_lens: list[int], heads: int, expected: int
) -> None:
    assert tile_rows(lengths, seq_lens, heads) == expected


def test_tiles_cover_every_row_once_the_longest_first() -> None:
    tiles = prefill_tiles([0, 1, 131, 331], [9, 140, 200], [1, 2], 5, TALL)
    assert tiles.tolist() == [[5, 129, 131, 138], [6, 259, 331, 128], [5, 1, 131, 10], [6, 131, 331, 0]]


def test_compiling_calls_for_both_heights_and_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    heights = []
    run = paged_prefill.paged_prefill

    def record(*arguments: object) -> None:
        heights.append(next(x.rows for x in arguments if isinstance(x, PrefillPlan)))
        run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(paged_prefill, "paged_prefill", record)
    query, cache = torch.zeros(1, HEADS, 16), torch.zeros(1, BLOCK, KV_HEADS, 16)
    compile_prefill(query, cache, cache)
    assert heights == [LOW, TALL]
