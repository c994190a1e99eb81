"""Stored medians of peers' decode attention on one H200 (CUDA 13.0, torch 2.11; FlashInfer 0.6.12 and vLLM
0.24's FlashAttention-3), in microseconds: fp16, head size 128, shuffled pages of 16, cold L2, graphs of 2 to
16 launches.

They stand for a peer that is not installed, and hold where the copy bandwidth and peer rows, measured in the
same run, agree with them (:func:`holds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COPY_BANDWIDTH = 4.25e12  # bytes/s, read and written
TOLERANCE = 0.03
ARMS = ("paged", "cascade", "fa3", "fa3 prefix+suffix")
_TIMES: dict[str, tuple[float, float, float, float]] = {
    "32/32 8x6000 +256": (95.1, 111, 130, 55.5),
    "32/32 16x6000 +256": (189, 126, 253, 70.8),
    "32/32 32x6000 +256": (379, 157, 527, 92.9),
    "32/32 64x6000 +256": (728, 210, 1095, 130),
    "32/32 64x2000 +256": (310, 157, 394, 115),
    "32/32 128x6000 +256": (1437, 314, 2287, 244),
    "32/32 16x32000 +256": (940, 478, 1416, 172),
    "32/32 64x6000 +1024": (890, 406, 1282, 318),
    "32/32 64x16 +1024": (275, 321, 282, 281),
    "32/8 8x6000 +256": (33.6, 107, 40.2, 28.7),
    "32/8 16x6000 +256": (54.8, 120, 65.8, 31.2),
    "32/8 32x6000 +256": (95.2, 145, 125, 43.0),
    "32/8 64x6000 +256": (185, 195, 245, 63.5),
    "32/8 64x2000 +256": (79.5, 142, 103, 55.4),
    "32/8 128x6000 +256": (365, 294, 490, 101),
    "32/8 16x32000 +256": (240, 467, 296, 59.7),
    "32/8 64x6000 +1024": (232, 374, 292, 116),
    "32/8 64x16 +1024": (78.9, 293, 83.1, 95.5),
}


def stored(row: str) -> dict[str, float]:
    """The arms' times in a row; empty where none are stored."""
    return dict(zip(ARMS, _TIMES.get(row, ()), strict=False))


def holds(bandwidth: float, rows: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a run on this machine agrees: its copy bandwidth, and the median of its peers' times over the
    stored ones. ``rows``: arms by name, each with ``us``, of each row."""
    ratios = sorted(
        arms[arm]["us"] / us
        for row, arms in rows.items()
        for arm, us in stored(row).items()
        if "us" in arms.get(arm, {})
    )
    close = [abs(bandwidth / COPY_BANDWIDTH - 1)] + [
        abs(ratio - 1) for ratio in ratios[len(ratios) // 2 :][:1]
    ]
    return len(close) == 2 and max(close) <= TOLERANCE
