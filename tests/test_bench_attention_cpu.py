"""The attention benchmark measures its rows, and notices two paths that differ."""

from __future__ import annotations

import pytest
from bench import attention_cpu
from bench.attention_cpu import Problem, Row, measure


def test_a_row_is_measured_beside_torch_and_without_sharing() -> None:
    result = measure(Row("t", 3, 90, 1, 64), repeats=2, pool_bytes=1 << 18, seconds=0.01)
    assert set(result["us"]) == {"native", "torch", "per_request"}
    assert all(figure["least"] > 0 for figure in result["us"].values())
    assert result["gb_per_s"] > 0
    assert result["error"] < attention_cpu.TOLERANCE


def test_the_bytes_and_products_of_a_row_are_counted_once() -> None:
    shared = Problem(Row("t", 3, 90, 1, 64), 1)
    assert shared.num_blocks == 4 + 3 * 2
    assert shared.layer_bytes == 10 * 16 * 2 * 3 * 64 * 2
    assert Row("t", 2, 5, 3).flops == 4 * 64 * 9 * 2 * (3 + 4 + 5)


def test_paths_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Problem.native
    monkeypatch.setattr(Problem, "native", lambda self, share: lambda layer: right(self, share)(layer) + 1)
    result = measure(Row("t", 1, 40), repeats=1, pool_bytes=1, seconds=0.01)
    assert result["error"] > attention_cpu.TOLERANCE
