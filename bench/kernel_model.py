"""A model of one launch of SharedPrefixAttention: the entries of a plan to microseconds, without a GPU.

Two thread blocks on each multiprocessor take the items of a plan in order. A tile takes a block ``alone_ns``,
two of them a multiprocessor ``tile_ns`` each; all blocks share the memory's bandwidth, and one gets at most
``block_bandwidth`` of it; tiles that several entries read come from memory once. Between two items a block is
idle, longer the more rows it has to write. Parts are written and read at ``merge_bandwidth``; ``fixed_us`` is
the rest.

Several sets of figures fit the stored run about as well (3.8 to 4.7 %, root mean square): they differ in what
they put down to the merge and to the end of an item. What a plan gains is to hold for all of them.

    python -m bench.kernel_model
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parrot._core import AttentionPlanner
from parrot.kernels.shared_prefix import MAX_ROWS, PlanCosts

from .kernel_rows import BLOCK, HEAD_DIM, I32, TILE, Batch, all_rows

Floats = npt.NDArray[np.float64]
MULTIPROCESSORS = 132
_TOKEN_BYTES = 4 * HEAD_DIM


@dataclass(frozen=True)
class Device:
    """What the model takes a launch to cost; bandwidths in bytes/ns."""

    bandwidth: float
    block_bandwidth: float
    merge_bandwidth: float
    tile_ns: float
    alone_ns: float
    gap_ns: float
    row_ns: float
    fixed_us: float
    row_factors: tuple[float, float, float]  # of a tile's arithmetic with up to 16, 32 and 48 rows


FITS = (
    Device(4174, 80, 1887, 506, 689, 231, 0.0, 5.14, (0.30, 0.64, 0.65)),
    Device(4180, 57, 8000, 596, 811, 502, 31.2, 7.33, (0.35, 0.48, 0.98)),
    Device(4120, 60, 2696, 527, 450, 356, 33.3, 4.98, (0.42, 0.61, 0.78)),
)


@dataclass(frozen=True)
class Items:
    """The items of a plan in their order: one for each entry and KV head."""

    tiles: Floats
    tile_bytes: Floats  # from memory
    rows: Floats
    part_bytes: int


def plan_items(batch: Batch, costs: PlanCosts) -> Items:
    """The planner's items for a full grid."""
    row, n = batch.row, batch.num_requests
    entries, members = np.zeros((8192, 8), np.int32), np.zeros((65536, 2), np.int32)
    num_entries, _, num_parts = AttentionPlanner().plan(
        batch.block_tables,
        batch.seq_lens,
        entries,
        members,
        np.zeros(n + 1, np.int32),
        group_size=row.group,
        num_kv_heads=row.kv_heads,
        num_workers=2 * MULTIPROCESSORS,
        max_rows=MAX_ROWS,
        entry_tokens=costs.entry_tokens,
        row_tokens=costs.row_tokens,
        work_percent=costs.work_percent,
    )
    entries = entries[:num_entries]
    tokens = entries[:, 2] - entries[:, 1]
    tiles = -(-tokens // TILE)
    tile_bytes = tokens * _TOKEN_BYTES / tiles / _readers(batch, entries)
    return Items(
        np.repeat(tiles.astype(float), row.kv_heads),
        np.repeat(tile_bytes, row.kv_heads),
        np.repeat(entries[:, 4].astype(float) * row.group, row.kv_heads),
        2 * num_parts * row.heads * (HEAD_DIM + 4) * 4,
    )


def _readers(batch: Batch, entries: I32) -> Floats:
    """How many entries read the tokens of each: those that end with the same block."""
    last = batch.block_tables[entries[:, 0], (entries[:, 2] - 1) // BLOCK]
    return np.bincount(last)[last].astype(float)


def predict_us(items: Items, device: Device) -> float:
    """How long a launch takes."""
    return _run_ns(items, device) / 1e3 + device.fixed_us + items.part_bytes / device.merge_bandwidth / 1e3


def _run_ns(items: Items, device: Device) -> float:
    """From the first tile to the end of the last item: between two events every block keeps its pace."""
    blocks = 2 * MULTIPROCESSORS
    factors = np.array([*device.row_factors, 1.0])[np.minimum(np.ceil(items.rows / 16).astype(int), 4) - 1]
    ends = items.rows * device.row_ns
    item = np.full(blocks, -1)
    count = min(blocks, len(items.tiles))
    item[:count] = np.arange(count)
    upcoming = count
    left, idle = np.zeros(blocks), np.zeros(blocks)
    left[:count] = items.tiles[:count]
    now = end = 0.0
    while (item >= 0).any():
        runs = (item >= 0) & (idle <= 0)
        rates = _rates(item, runs, items.tile_bytes, factors, device)
        waits = np.where(runs, left / np.maximum(rates, 1e-30), np.where(item >= 0, idle, math.inf))
        step = float(waits.min())
        now += step
        left = np.where(runs, left - rates * step, left)
        idle = np.where(runs | (item < 0), idle, np.maximum(idle - step, 0.0))
        for block in np.flatnonzero(runs & (waits <= step * (1 + 1e-9))):
            end = max(end, now + ends[item[block]])
            idle[block] = device.gap_ns + ends[item[block]]
            item[block] = upcoming if upcoming < len(items.tiles) else -1
            if item[block] >= 0:
                left[block] = items.tiles[upcoming]
                upcoming += 1
    return end


def _rates(
    item: npt.NDArray[np.int64],
    runs: npt.NDArray[np.bool_],
    tile_bytes: Floats,
    factors: Floats,
    device: Device,
) -> Floats:
    """Tiles per nanosecond of each block."""
    work = np.where(runs, factors[item], 0.0)
    both = work + np.roll(work, MULTIPROCESSORS)
    rates = np.where(
        runs, 1.0 / np.maximum(np.maximum(device.alone_ns * work, device.tile_ns * both), 1e-30), 0.0
    )
    rates = np.minimum(rates, device.block_bandwidth / (TILE * _TOKEN_BYTES))
    demand = float((rates * np.where(runs, tile_bytes[item], 0.0)).sum())
    return rates * min(1.0, device.bandwidth / demand) if demand else rates


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values."""
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    """Print what each row is to take with the balance of the stored run and with today's."""
    before, after = PlanCosts(80, 0, 0), PlanCosts()
    print(f"{'row':<42}{'parts':>12}{'before us':>11}{'after us':>10}{'change in each fit':>28}")
    for row in all_rows():
        batch = Batch(row)
        plans = [plan_items(batch, costs) for costs in (before, after)]
        times = [[predict_us(items, device) for device in FITS] for items in plans]
        scale = 2 * row.heads * (HEAD_DIM + 4) * 4
        changes = " ".join(f"{100 * (b / a - 1):+6.1f} %" for a, b in zip(*times, strict=True))
        parts = "->".join(str(items.part_bytes // scale) for items in plans)
        means = [geometric_mean(each) for each in times]
        print(f"{row.name:<42}{parts:>12}{means[0]:>11.1f}{means[1]:>10.1f}{changes:>28}", flush=True)


if __name__ == "__main__":
    main()
