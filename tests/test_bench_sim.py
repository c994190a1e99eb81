"""The simulated figures: both kinds of clients run the same applications, and pay the network they should."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from bench import sim
from bench.simulation.applications import (
    PROMPT,
    ROUNDS,
    Application,
    chain_summary,
    map_reduce,
    multi_agent,
)
from bench.simulation.figure import Figure, Point
from bench.simulation.figure17 import sustained
from bench.simulation.world import BASELINE_OFF, NETWORK_S, Arm, Done, World, simulate

WHOLE, SINGLE = Arm("whole"), Arm("single", BASELINE_OFF, whole_graph=False)


def run(application: Application, arm: Arm, seed: int = 1) -> Done:
    async def load(world: World) -> None:
        await world.run(application)

    world = simulate(arm, load, seed=seed, cost="h200-llama-7b", num_engines=2).world
    return world.done[0]


@pytest.mark.parametrize("make", [lambda r: chain_summary(r, 5, 60, 20), lambda r: map_reduce(r, 4, 60, 20)])
def test_both_kinds_of_clients_get_the_same_answer_by_their_own_ways(make) -> None:  # type: ignore[no-untyped-def]
    application = make(random.Random(3))
    whole, single = run(application, WHOLE), run(application, SINGLE)
    assert whole.answer == single.answer
    assert len(whole.answer.split()) == 20
    assert whole.prompt_tokens == single.prompt_tokens


def test_a_whole_graph_pays_the_network_once_and_single_calls_pay_for_each() -> None:
    application = chain_summary(random.Random(3), 6, 60, 20)
    whole, single = run(application, WHOLE), run(application, SINGLE)
    low, high = NETWORK_S
    assert 5 * low - (high - low) <= single.latency_s - whole.latency_s <= 5 * high + (high - low)


def test_the_multi_agent_application_has_the_tokens_of_the_original_in_both_ways() -> None:
    num_files = 3
    application = multi_agent(random.Random(3), num_files)
    branches = PROMPT["coder"] + ROUNDS * (PROMPT["reviewer"] + PROMPT["reviser"])
    package = 1 + 20 + 413 + 413 + 346
    whole, single = run(application, WHOLE), run(application, SINGLE)
    assert whole.prompt_tokens == single.prompt_tokens == PROMPT["architect"] + num_files * branches + package
    assert whole.answer == single.answer


def test_the_same_seed_gives_the_same_run() -> None:
    application = map_reduce(random.Random(3), 4, 60, 20)
    assert run(application, WHOLE) == run(application, WHOLE)
    assert run(application, WHOLE, seed=2).latency_s != run(application, WHOLE).latency_s


def test_a_rate_is_sustained_while_the_mean_is_within_twice_the_lowest() -> None:
    means = {"a": (30.0, 60.0, 61.0), "b": (30.0, 300.0, 50.0)}
    points = [
        Point(arm, rate, seed, {"ms/token": value + seed / 100})
        for arm, values in means.items()
        for rate, value in zip((1.0, 2.0, 4.0), values, strict=True)
        for seed in (-1, 0, 1)
    ]
    assert sustained(Figure("17", "", points, "requests/s")) == "sustained: a 2/s, b 1/s"


def test_a_quick_figure_is_named_so_and_not_set_beside_the_paper(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "parrot")  # as the benchmark does; this puts the level back
    points = [Point("a", 1.0, seed, {"s": 2.0}) for seed in (1, 2)]
    full = Figure("12a", "chains", points, "requests/s", paper={"a": {"s @ 1": 77.0}})
    monkeypatch.setattr(sim, "PICTURES", tmp_path)
    monkeypatch.setitem(sim.PARTS, "12a", lambda *_, **__: full)
    made = sim.run(True, ["12a"])["figures"]["12a"]
    assert (made["title"], made["paper"]) == ("chains (quick)", {})
    printed = capsys.readouterr().out
    assert "77" not in printed
    assert "no picture: a single value of requests/s" in printed
    assert list(tmp_path.iterdir()) == []
    sim.run(False, ["12a"])
    assert "77" in capsys.readouterr().out
