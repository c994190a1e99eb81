"""The native core's benchmarks run at tiny sizes, find what they put in, and notice a wrong answer."""

from __future__ import annotations

import pytest
from bench import context_tree, eviction, prefix_index, scheduler, scheduler_native
from bench.scheduler_load import TIGHT, WORKLOADS
from bench.timing import of_repeats, percentile_us, show, spread


def test_the_context_tree_is_measured() -> None:
    sizes = context_tree.Sizes(
        batches=(4,), num_steps=20, num_events=20, num_parents=2, num_turns=100, num_cached=4, repeats=2
    )
    result = context_tree.measure(sizes)
    assert len(result["events"]) == 6
    assert all(figure["p99_us"]["least"] > 0 for figure in result["events"].values())
    assert result["extends_per_s"]["4"]["least"] > 0
    assert result["churn"]["evicted_per_s"]["least"] > 0


def test_the_prefix_index_is_measured_and_agrees_with_a_radix_tree_and_with_comparison() -> None:
    sizes = prefix_index.Sizes((300,), (300,), (5,), num_events=500, repeats=2)
    result = prefix_index.measure(sizes)
    assert result["ok"]
    assert set(result["lookups"]) == set(result["calls"]) == set(result["long"]) == {"300"}
    assert result["lookups"]["300"]["matches_per_s"]["least"] > 0


def test_an_index_that_answers_wrongly_fails_the_benchmark() -> None:
    right = {"same_answers": True, "match": {"p50_us": 1.0}, "rate": 3}
    assert prefix_index.combine([right, right])["ok"]
    assert not prefix_index.combine([right, right | {"same_answers": False}])["ok"]


def test_the_scheduler_is_measured_under_every_workload() -> None:
    native = scheduler_native.Sizes((1, 20), (0, 100), ((20, 100),), (20,), 80, 500, 1)
    sizes = scheduler.Sizes(((1, 20), (4, 20)), ((4, 20),), native, num_rounds=3, num_weighed=10, repeats=2)
    result = scheduler.measure(sizes)
    assert len(result["native"]["rows"]) == 4 * len(scheduler_native.MAIN) + len(scheduler_native.OTHER)
    assert all(row["placements_per_s"]["least"] > 0 for row in result["native"]["rows"])
    assert all(0 < figure < 20_000 for figure in result["native"]["bytes_per_queued_call"].values())
    assert result["native"]["shortlists"][0]["excess"]["max"] <= 0.05
    rows = result["rows"]
    expected = [(engines, workload.name) for engines in (1, 4) for workload in WORKLOADS]
    assert [(row["engines"], row["calls"]) for row in rows] == [*expected, (4, TIGHT.name)]
    for row in rows:
        assert row["placements_per_s"]["least"] > 0
        assert ("placed_group" in row["counters"]) == ("groups" in row["calls"])


def test_a_target_of_the_scheduler_that_is_missed_fails_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(bytes_per_call: float, num_weighed: int) -> bool:
        native = scheduler_native.Sizes((), (), (), (), 1, num_weighed, 1)
        answer = {"calls": "alone", "bytes_per_queued_call": bytes_per_call}
        monkeypatch.setattr(scheduler_native, "run_driver", lambda *_: answer)
        return bool(scheduler.measure(scheduler.Sizes((), (), native, num_weighed=10, repeats=1))["ok"])

    monkeypatch.setattr(scheduler_native, "build_driver", lambda _: None)
    assert result(1000, 100_000)
    assert not result(1100, 100_000)
    assert "not judged at these sizes: placements/s" in capsys.readouterr().out
    assert result(1100, 10_000), "so few calls are not judged by their memory"
    assert "bytes per queued call: <= 1,024" in capsys.readouterr().out


def test_graph_aware_eviction_misses_less_than_lru_and_no_less_than_the_optimum() -> None:
    result = eviction.measure(eviction.Sizes(files=(4,), parts=(0.5, 1.0), seeds=1))
    assert result["ok"]
    parts = result["rows"][0]["parts"]
    lru, graph, optimum = (parts["0.5"][policy]["median"] for policy in eviction.POLICIES)
    assert 0 < optimum <= graph < lru
    assert parts["1.0"]["graph"]["median"] == 0


def test_a_spread_is_median_and_extremes() -> None:
    assert spread([3, 1, 200.04]) == {"median": 3.0, "least": 1.0, "most": 200.0}
    times = list(range(1000, 101_000, 1000))
    assert (percentile_us(times, 50), percentile_us(times[::-1], 99)) == (50.0, 99.0)


def test_a_single_run_has_no_range() -> None:
    assert (show(spread([1.0, 2.0, 4.0]), 1), of_repeats(3)) == (
        "2.0 (1.0 to 4.0)",
        "median (least to most) of 3",
    )
    assert (show(spread([2.0]), 1), of_repeats(1)) == ("2.0", "a single run")
