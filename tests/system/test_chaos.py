"""A minute of killed, stopped and cut off processes under many clients, a third of whom leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.chaos import run_chaos
from bench.chaos.faults import KINDS

pytestmark = pytest.mark.system


@pytest.mark.timeout(600)
def test_every_get_ends_nothing_leaks_and_every_value_is_right(tiny_model: Path, tmp_path: Path) -> None:
    report = run_chaos(tmp_path, seconds=60, seed=7, model=tiny_model)
    print(report.table())
    assert report.problems == []
    assert report.faults.keys() == KINDS.keys()
    # A call that was hit too often may end with a typed error; that is the exception.
    assert report.outcomes["right"] > 10 * sum(
        count for what, count in report.outcomes.items() if what.startswith("typed error")
    )
