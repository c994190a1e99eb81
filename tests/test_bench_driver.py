"""The driver of the benchmarks."""

from __future__ import annotations

import pytest
from bench.__main__ import _command


@pytest.mark.parametrize("place", [[], ["--json", "somewhere/else.json"], ["--json=somewhere/else.json"]])
def test_a_stored_run_says_what_was_asked_for_and_not_where_it_lies(place: list[str]) -> None:
    assert _command(["sim", *place, "--only", "12a", "--quick"]) == "python -m bench sim --only 12a --quick"
