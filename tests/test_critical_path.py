"""Targets in time, carried down: by hand, and against every path through random graphs."""

from __future__ import annotations

import random
from functools import cache

import pytest

from graph_builder import finish, flow_call, join, make_graph, prompt_call, submit, value, write
from parrot import api
from parrot.errors import DeadlineExceeded
from parrot.manager.analysis import deduce, deducing
from parrot.manager.cone import NODES_AT_ONCE
from parrot.manager.demand import Demand
from parrot.manager.graph import Graph
from parrot.manager.pace import Pace
from parrot.manager.slices import run_whole
from parrot.wire import CostModel

# 10 ms until the first token, then 1 ms a token: a call of 21 tokens takes 30 ms.
PACE = Pace(base_us=10_000, per_prefill_token_us=0, per_token_us=1_000)
TOOK_US = 30_000


def call(name: str, inputs: list[str], outputs: list[str], *, tokens: int = 21) -> api.CallBody:
    sampling = {"max_tokens": tokens}
    placeholders = [write(output, sampling=sampling) for output in outputs]
    holes = " ".join(
        [f"{{{{input:{read}}}}}" for read in inputs] + [f"{{{{output:{name}}}}}" for name in outputs]
    )
    return prompt_call(name, f"{name} {holes}", *placeholders)


def labelled(graph: Graph, *labels: tuple[str, api.Criteria, float | None], now_us: int = 0) -> Graph:
    for var_id, criteria, target_ms in labels:
        graph.label(var_id, criteria, target_ms=target_ms, now_us=now_us)
    deduce(graph, now_us=now_us, pace=PACE)
    return graph


def starts(graph: Graph) -> dict[str, int | None]:
    return {call.request_id: call.targets.start_by_us for call in graph.calls.values()}


def objectives(graph: Graph) -> str:
    """One letter per call: L or T."""
    return "".join(call.objective[0] for call in graph.calls.values())


def chain() -> Graph:
    graph = make_graph()
    submit(graph, call("A", [], ["a"]), call("B", ["a"], ["b"]), call("C", ["b"], ["c"]))
    return graph


def test_a_deadline_is_carried_down_by_what_each_call_takes() -> None:
    graph = labelled(chain(), ("c", "DEADLINE", 1_000))
    assert starts(graph) == {"A": 910_000, "B": 940_000, "C": 970_000}


def test_a_deadline_is_throughput_work_until_it_is_near() -> None:
    graph = labelled(chain(), ("c", "DEADLINE", 1_000))
    assert objectives(graph) == "TTT"
    assert graph.review_us == 1_000_000 - 2 * 3 * TOOK_US
    graph.is_stale = True
    assert deduce(graph, now_us=graph.review_us - 1, pace=PACE) == []
    graph.is_stale = True
    changed = deduce(graph, now_us=graph.review_us or 0, pace=PACE)
    assert len(changed) == 3
    assert objectives(graph) == "LLL"
    assert graph.review_us is None


def test_what_has_run_shortens_the_path() -> None:
    graph = labelled(chain(), ("c", "DEADLINE", 1_000))
    finish(graph, "A", "text")
    graph.is_stale = True
    deduce(graph, now_us=1_000_000 - 2 * 2 * TOOK_US - 1, pace=PACE)
    assert objectives(graph) == "TTT"
    graph.is_stale = True
    deduce(graph, now_us=1_000_000 - 2 * 2 * TOOK_US, pace=PACE)
    assert objectives(graph) == "TLL"


def test_a_near_deadline_makes_task_groups_as_latency_does() -> None:
    graph = make_graph()
    submit(graph, *[call(f"M{i}", [], [f"m{i}"]) for i in range(3)], call("R", ["m0", "m1", "m2"], ["r"]))
    labelled(graph, ("r", "DEADLINE", 100))
    assert objectives(graph) == "TTTL"
    assert [call.task_group for call in graph.calls.values()] == [0, 0, 0, None]
    assert starts(graph) == {"M0": 40_000, "M1": 40_000, "M2": 40_000, "R": 70_000}


def test_the_first_token_is_due_after_the_prompt_of_its_call_and_all_before_it() -> None:
    graph = labelled(chain(), ("c", "TTFT", 500), now_us=1_000)
    assert objectives(graph) == "LLL"
    assert starts(graph) == {"A": 501_000 - 70_000, "B": 501_000 - 40_000, "C": 501_000 - 10_000}


def test_the_first_token_of_a_derived_variable_needs_its_sources_whole() -> None:
    graph = make_graph()
    submit(graph, call("A", [], ["a"]), call("B", [], ["b"]), variables=[join("j", "a", "b")])
    labelled(graph, ("j", "TTFT", 500))
    assert starts(graph) == {"A": 470_000, "B": 470_000}


def test_the_steps_of_one_call_come_one_after_another() -> None:
    graph = make_graph()
    two = prompt_call("A", "{{output:a}}{{output:b}}", *[write(x, sampling={"max_tokens": 21}) for x in "ab"])
    submit(graph, two)
    labelled(graph, ("b", "DEADLINE", 100))
    assert starts(graph) == {"A": 40_000}
    finish(graph, "A", "first")
    graph.is_stale = True
    deduce(graph, pace=PACE)
    assert starts(graph) == {"A": 70_000}


def test_what_a_token_may_take_holds_for_the_producer_alone() -> None:
    graph = labelled(chain(), ("c", "TPOT", 40), ("c", "TPOT", 30), ("b", "TPOT", 50))
    assert objectives(graph) == "LLL"
    targets = [call.targets.per_token_us for call in graph.calls.values()]
    assert targets == [None, 50_000, 30_000]
    assert starts(graph) == dict.fromkeys("ABC")


def test_a_call_may_carry_its_target() -> None:
    graph = make_graph()
    body = flow_call("A", [], ["a"], objective="TPOT", target_ms=20.0)
    submit(graph, body)
    deduce(graph, pace=PACE)
    assert graph.calls[1].targets.per_token_us == 20_000  # type: ignore[index]
    assert objectives(graph) == "L"


def test_of_several_labels_the_strictest_holds_with_the_earliest_targets() -> None:
    one = Demand.of("DEADLINE", 100, now_us=0)
    assert one.merge(Demand.of("DEADLINE", 50, now_us=10_000)) == Demand(
        "DEADLINE", due_us=60_000, expires_us=100_000
    )
    assert one.merge(Demand.of("THROUGHPUT", None, now_us=0)) == Demand("DEADLINE", due_us=100_000)
    merged = one.merge(Demand.of("TTFT", 20, now_us=0)).merge(Demand.of("TPOT", 5, now_us=0))
    assert merged == Demand("TTFT", first_token_by_us=20_000, due_us=100_000, per_token_us=5_000)
    assert merged.merge(Demand.of("LATENCY", None, now_us=0)).criteria == "LATENCY"


def test_a_later_label_makes_a_start_earlier_and_never_later() -> None:
    graph = labelled(chain(), ("c", "DEADLINE", 1_000))
    labelled(graph, ("b", "DEADLINE", 500))
    assert starts(graph) == {"A": 440_000, "B": 470_000, "C": 970_000}
    labelled(graph, ("b", "DEADLINE", 800))
    assert starts(graph) == {"A": 440_000, "B": 470_000, "C": 970_000}


def test_without_a_cost_model_the_deadline_itself_is_carried_down() -> None:
    graph = chain()
    graph.label("c", "DEADLINE", target_ms=1_000)
    deduce(graph)
    assert starts(graph) == dict.fromkeys("ABC", 1_000_000)
    assert objectives(graph) == "TTT"


def test_prompts_count_with_the_texts_that_are_to_come() -> None:
    pace = Pace(base_us=0, per_prefill_token_us=100, per_token_us=0)
    graph = make_graph()
    submit(
        graph,
        prompt_call("A", "x" * 400 + "{{output:a}}", write("a", sampling={"max_tokens": 50})),
        prompt_call("B", "{{input:j}}{{input:k}}{{output:b}}"),
        variables=[value("k", "y" * 80), join("j", "a", "k")],
        labels={},
    )
    graph.label("b", "DEADLINE", target_ms=100)
    deduce(graph, pace=pace)
    assert starts(graph)["B"] == 100_000 - 100 * (50 + 20 + 20)
    assert starts(graph)["A"] == 100_000 - 100 * (50 + 20 + 20) - 100 * 100


def test_the_pace_is_that_of_the_slowest_engine_at_the_load_that_latency_allows() -> None:
    fast = CostModel(1_000, 10, 5, 0.1, 64_000, 4_000)
    slow = CostModel(2_000, 10, 7, 1.0, 3_000, 4_000)
    assert Pace.of([fast, slow], kv_tokens=6_144) == Pace(2_000, 7, 2_000 + 80 + 3_000)
    assert Pace.of([], kv_tokens=6_144) == Pace()


def test_a_variable_that_is_not_there_in_time_ends_with_what_only_it_needed() -> None:
    graph = chain()
    submit(graph, call("D", ["a"], ["d"]))
    labelled(graph, ("c", "DEADLINE", 100), ("d", "LATENCY", None))
    assert graph.next_time_us() == 100_000
    assert not graph.expire(99_999).ended
    ended = graph.expire(100_000).ended
    assert sorted(call.request_id for call in ended) == ["B", "C"]
    with pytest.raises(DeadlineExceeded, match=r"variable c \(an output of .+\) was not there"):
        graph.variable("c").result()
    assert set(graph.live) == {"A", "D"}
    assert not graph.expire(200_000).ended


@pytest.mark.parametrize("later", ["LATENCY", "THROUGHPUT"])
def test_a_variable_that_somebody_wants_without_a_deadline_does_not_expire(later: api.Criteria) -> None:
    graph = labelled(chain(), ("c", "DEADLINE", 100), ("c", later, None))
    assert not graph.expire(10**9).ended
    assert graph.variable("c").pending


def test_a_deadline_of_a_call_is_that_of_its_outputs() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["a"], objective="DEADLINE", target_ms=50.0))
    assert [call.request_id for call in graph.expire(50_000).ended] == ["A"]
    assert graph.calls[1].state == "cancelled"  # type: ignore[index]


def test_a_producer_that_comes_between_two_slices_is_deduced_next_time() -> None:
    graph = make_graph()
    names = [f"v{i}" for i in range(2 * NODES_AT_ONCE)]
    submit(graph, *[call(name, ["x"], [name]) for name in names], variables=[value("x"), join("j", *names)])
    graph.label("j", "DEADLINE", target_ms=1_000)
    slices = deducing(graph, pace=PACE)
    for _ in range(10):  # the cone is there, its times are not
        next(slices)
    submit(graph, call("X", [], ["x"]))
    assert graph.is_stale
    run_whole(slices)
    assert starts(graph)["X"] is None
    deduce(graph, pace=PACE)
    assert starts(graph) == {"X": 940_000, **dict.fromkeys(names, 970_000)}


def test_a_start_is_the_earliest_over_all_paths_of_random_graphs() -> None:
    rng = random.Random(3)
    for _ in range(150):
        count = rng.randint(1, 10)
        reads = {i: rng.sample(range(i), rng.randint(0, min(i, 3))) for i in range(count)}
        tokens = {i: rng.randint(1, 40) for i in range(count)}
        due = {i: rng.randint(500, 3_000) for i in rng.sample(range(count), rng.randint(1, count))}
        graph = make_graph()
        submit(
            graph,
            *[call(f"C{i}", [f"v{j}" for j in reads[i]], [f"v{i}"], tokens=tokens[i]) for i in range(count)],
        )
        labelled(graph, *[(f"v{i}", "DEADLINE", float(due_ms)) for i, due_ms in due.items()])

        @cache
        def expected(i: int) -> float:
            ends = [due[i] * 1000.0] if i in due else []  # noqa: B023 - called within this round only
            ends += [expected(j) for j in range(count) if i in reads[j]]  # noqa: B023
            return min(ends, default=float("inf")) - 10_000 - 1_000 * (tokens[i] - 1)  # noqa: B023

        for number, start in enumerate(starts(graph).values()):
            assert start == (None if expected(number) == float("inf") else expected(number))
