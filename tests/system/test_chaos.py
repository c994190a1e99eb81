"""Half a minute of killed, stopped and cut off processes under many clients, a third of whom leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.chaos import run_chaos

pytestmark = pytest.mark.system


@pytest.mark.timeout(600)
def test_every_get_ends_nothing_leaks_and_every_value_is_right(tiny_model: Path, tmp_path: Path) -> None:
    report = run_chaos(tmp_path, seconds=20, seed=7, model=tiny_model)
    print(report.table())
    assert report.problems == []
    assert sum(report.faults.values()) >= 3
