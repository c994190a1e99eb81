"""The benchmark of placements meets its targets at the tests' sizes, and says so when one is missed."""

from __future__ import annotations

import pytest
from bench.placement.run import Figure, Sizes, measure, report

SIZES = Sizes(num_cases=4, num_groups=12, num_flood_steps=400, num_fleets=1)


def test_every_figure_is_computed_beside_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    result = measure(SIZES)
    kinds = {figure["name"][:12] for figure in result["figures"]}
    assert kinds == {
        figure[:12]
        for figure in (
            "6 calls, 3 engines",
            "32 equal calls",
            "64,000 tokens",
            "group with 7,000",
            "Zipf(1.1), 16 engines",
            "cold call in a flood",
            "shortlist: score",
        )
    }
    assert len(result["checks"]) == len(result["figures"])
    missed = [name for name, met in result["checks"].items() if not met]
    assert all("tokens a step" in name for name in missed), "no more than short steps of prompts make wrong"
    assert capsys.readouterr().out.count("MISSED") == len(missed)


def test_a_missed_target_fails_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    met = [Figure("a", 1.5, 1.5), Figure("b", 0.9, 0.9, at_least=True)]
    assert report(met)["ok"]
    assert "MISSED" not in capsys.readouterr().out
    result = report([*met, Figure("c", 0.89, 0.9, at_least=True), Figure("d", 1.51, 1.5)])
    assert not result["ok"]
    assert result["checks"] == {"a": True, "b": True, "c": False, "d": False}
    assert "MISSED  c: 0.89, target >= 0.9" in capsys.readouterr().out
