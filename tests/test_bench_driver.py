"""The driver of the benchmarks."""

from __future__ import annotations

import json
import sys

import pytest
from bench.__main__ import _command
from bench.timing import print_result


@pytest.mark.parametrize("place", [[], ["--json", "somewhere/else.json"], ["--json=somewhere/else.json"]])
def test_a_stored_run_says_what_was_asked_for_and_not_where_it_lies(place: list[str]) -> None:
    assert _command(["sim", *place, "--only", "12a", "--quick"]) == "python -m bench sim --only 12a --quick"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_result_is_printed_for_programs_and_not_on_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    print_result({"ok": True})
    out = capsys.readouterr().out
    if is_terminal:
        assert out == ""
    else:
        assert json.loads(out.removeprefix("RESULT ")) == {"ok": True}
