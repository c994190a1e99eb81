"""Objective deduction and task groups, on the shapes that applications have (paper section 5.2, figure 9)."""

from __future__ import annotations

import random
import time

from graph_builder import finish, flow_call, join, make_graph, prompt_call, submit, value
from parrot import api
from parrot.errors import EngineError
from parrot.manager.analysis import deduce
from parrot.manager.graph import Graph


def deduced(*calls: api.CallBody, labels: dict[str, api.Criteria], **fields: object) -> Graph:
    graph = make_graph()
    submit(graph, *calls, labels=labels, **fields)
    deduce(graph)
    return graph


def latency_calls(graph: Graph) -> set[str]:
    return {call.request_id for call in graph.calls.values() if call.objective == "LATENCY"}


def groups(graph: Graph) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for call in graph.calls.values():
        if call.task_group is not None:
            assert call.objective == "THROUGHPUT"
            found.setdefault(call.task_group, set()).add(call.request_id)
    return found


def depths(graph: Graph) -> dict[str, int | None]:
    return {call.request_id: call.depth for call in graph.calls.values()}


def test_figure_9() -> None:
    graph = deduced(
        *[flow_call(f"P{i}", [], [f"p{i}"]) for i in range(3)],
        *[flow_call(f"Q{i}", [], [f"q{i}"]) for i in range(4)],
        flow_call("R3", [], ["r3"]),
        flow_call("R1", ["r3", "p0", "p1", "p2"], ["r1"]),
        flow_call("R2", ["r3", "q0", "q1", "q2", "q3"], ["r2"]),
        labels={"r1": "LATENCY", "r2": "LATENCY"},
    )
    assert latency_calls(graph) == {"R1", "R2", "R3"}
    assert groups(graph) == {0: {"P0", "P1", "P2"}, 1: {"Q0", "Q1", "Q2", "Q3"}}


def test_unlabelled_calls_are_throughput_without_group_or_depth() -> None:
    graph = deduced(flow_call("A", [], ["a"]), flow_call("B", ["a"], ["b"]), labels={})
    assert latency_calls(graph) == set()
    assert groups(graph) == {}
    assert depths(graph) == {"A": None, "B": None}


def test_a_chain_is_latency_throughout() -> None:
    graph = deduced(
        flow_call("A", [], ["a"]),
        flow_call("B", ["a"], ["b"]),
        flow_call("C", ["b"], ["c"]),
        flow_call("Stranger", [], ["s"]),
        labels={"c": "LATENCY"},
    )
    assert latency_calls(graph) == {"A", "B", "C"}
    assert depths(graph) == {"A": 2, "B": 1, "C": 0, "Stranger": None}


def test_the_maps_of_a_map_reduce_are_one_group() -> None:
    maps = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(5)]
    graph = deduced(*maps, flow_call("R", [f"m{i}" for i in range(5)], ["r"]), labels={"r": "LATENCY"})
    assert latency_calls(graph) == {"R"}
    assert groups(graph) == {0: {f"M{i}" for i in range(5)}}


def test_derived_variables_are_transparent() -> None:
    maps = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(3)]
    graph = deduced(
        *maps,
        flow_call("R", ["j"], ["r"]),
        labels={"final": "LATENCY"},
        variables=[join("s0", "m0"), join("j", "s0", "m1", "m2"), join("final", "r")],
    )
    assert latency_calls(graph) == {"R"}
    assert groups(graph) == {0: {"M0", "M1", "M2"}}
    assert depths(graph) == {"M0": 1, "M1": 1, "M2": 1, "R": 0}


def test_a_labelled_join_is_a_group_and_a_labelled_strip_is_latency() -> None:
    calls = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(3)]
    joined = deduced(*calls, labels={"j": "LATENCY"}, variables=[join("j", "m0", "m1", "m2")])
    assert groups(joined) == {0: {"M0", "M1", "M2"}}
    stripped = deduced(calls[0], labels={"j": "LATENCY"}, variables=[join("j", "m0")])
    assert latency_calls(stripped) == {"M0"}


def coders_and_reviewers(count: int) -> list[api.CallBody]:
    codes = [f"code{i}" for i in range(count)]
    return [
        flow_call("Plan", [], ["plan"]),
        *[flow_call(f"Coder{i}", ["plan"], [f"code{i}"]) for i in range(count)],
        *[flow_call(f"Reviewer{i}", codes, [f"review{i}"]) for i in range(count)],
    ]


def test_coders_each_read_by_all_reviewers_are_one_group() -> None:
    reviews = {f"review{i}": "LATENCY" for i in range(3)}
    graph = deduced(*coders_and_reviewers(3), labels=reviews)  # type: ignore[arg-type]
    assert groups(graph) == {0: {"Coder0", "Coder1", "Coder2"}}
    assert latency_calls(graph) == {"Plan", "Reviewer0", "Reviewer1", "Reviewer2"}

    final = flow_call("Final", list(reviews), ["final"])
    graph = deduced(*coders_and_reviewers(3), final, labels={"final": "LATENCY"})
    assert sorted(groups(graph).values(), key=min) == [
        {"Coder0", "Coder1", "Coder2"},
        {"Reviewer0", "Reviewer1", "Reviewer2"},
    ]
    assert latency_calls(graph) == {"Plan", "Final"}
    assert depths(graph)["Plan"] == 3


def test_consumers_that_overlap_in_a_chain_make_one_group() -> None:
    graph = deduced(
        *[flow_call(f"M{i}", [], [f"m{i}"]) for i in range(4)],
        *[flow_call(f"R{i}", [f"m{i}", f"m{i + 1}"], [f"r{i}"]) for i in range(3)],
        flow_call("Apart", [], ["apart"]),
        flow_call("R9", ["apart"], ["r9"]),
        flow_call("F", ["r0", "r1", "r2", "r9"], ["f"]),
        labels={"f": "LATENCY"},
    )
    assert sorted(groups(graph).values(), key=min) == [{"M0", "M1", "M2", "M3"}, {"R0", "R1", "R2", "R9"}]
    assert latency_calls(graph) == {"F", "Apart"}


def test_the_arms_of_a_diamond_are_a_group_and_its_ends_are_latency() -> None:
    graph = deduced(
        flow_call("A", [], ["a"]),
        flow_call("B", ["a"], ["b"]),
        flow_call("C", ["a"], ["c"]),
        flow_call("D", ["b", "c"], ["d"]),
        labels={"d": "LATENCY"},
    )
    assert latency_calls(graph) == {"A", "D"}
    assert groups(graph) == {0: {"B", "C"}}


def test_predecessors_at_unequal_depths_are_not_grouped() -> None:
    graph = deduced(
        flow_call("A", [], ["a"]),
        flow_call("B", ["a"], ["b"]),
        flow_call("C", ["a", "b"], ["c"]),
        labels={"c": "LATENCY"},
    )
    assert latency_calls(graph) == {"A", "B", "C"}
    assert depths(graph) == {"A": 2, "B": 1, "C": 0}


def test_depth_is_the_longest_path_to_a_labelled_variable() -> None:
    graph = deduced(
        flow_call("A", [], ["a"]),
        flow_call("B", ["a"], ["b"]),
        flow_call("C", ["b"], ["c"]),
        labels={"a": "LATENCY", "c": "LATENCY"},
    )
    assert depths(graph) == {"A": 2, "B": 1, "C": 0}
    assert latency_calls(graph) == {"A", "B", "C"}


def test_a_labelled_producer_leaves_its_group() -> None:
    maps = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(3)]
    graph = deduced(
        *maps, flow_call("R", ["m0", "m1", "m2"], ["r"]), labels={"r": "LATENCY", "m1": "LATENCY"}
    )
    assert latency_calls(graph) == {"R", "M1"}
    assert groups(graph) == {0: {"M0", "M2"}}


def test_throughput_marks_ancestors_and_latency_is_stricter() -> None:
    calls = (flow_call("A", [], ["a"]), flow_call("B", ["a"], ["b"]), flow_call("C", ["a"], ["c"]))
    graph = deduced(*calls, labels={"b": "THROUGHPUT"})
    assert latency_calls(graph) == set()
    assert depths(graph) == {"A": 1, "B": 0, "C": None}
    graph = deduced(*calls, labels={"b": "THROUGHPUT", "c": "LATENCY"})
    assert latency_calls(graph) == {"A", "C"}
    graph = deduced(*calls, labels={"a": "LATENCY", "b": "THROUGHPUT"})
    assert latency_calls(graph) == {"A"}
    assert depths(graph) == {"A": 0, "B": 0, "C": None}


def test_a_later_label_upgrades_what_has_not_finished() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["a"]), flow_call("B", ["a"], ["b"]), flow_call("C", ["b"], ["c"]))
    assert deduce(graph) == []
    finish(graph, "A", "v")
    graph.label("c", "THROUGHPUT")
    deduce(graph)
    assert latency_calls(graph) == set()
    graph.label("c", "LATENCY")
    changed = deduce(graph)
    assert {call.request_id for call in changed} == latency_calls(graph) == {"B", "C"}
    assert deduce(graph) == []


def test_a_label_may_come_before_the_producer() -> None:
    graph = deduced(labels={"x": "LATENCY"}, variables=[value("x")])
    submit(graph, flow_call("A", [], ["x"]))
    deduce(graph)
    assert latency_calls(graph) == {"A"}


def test_a_call_may_carry_its_objective() -> None:
    graph = make_graph()
    submit(graph, flow_call("A", [], ["a"]), flow_call("B", ["a"], ["b"], objective="LATENCY"))
    deduce(graph)
    assert latency_calls(graph) == {"A", "B"}


def test_a_group_stays_one_while_its_members_finish() -> None:
    maps = [flow_call(f"M{i}", [], [f"m{i}"]) for i in range(3)]
    graph = deduced(*maps, flow_call("R", ["m0", "m1", "m2"], ["r"]), labels={"r": "LATENCY"})
    finish(graph, "M0", "v")
    finish(graph, "M1", "v")
    submit(graph, flow_call("X", [], ["x"]), labels={"x": "LATENCY"})
    assert [call.request_id for call in deduce(graph)] == ["X"]
    assert groups(graph) == {0: {"M0", "M1", "M2"}}


def test_the_halves_of_a_split_group_get_different_numbers() -> None:
    graph = deduced(
        *[flow_call(f"M{i}", [], [f"m{i}"]) for i in range(4)],
        flow_call("R1", ["m0", "m1"], ["r1"]),
        flow_call("R2", ["m2", "m3"], ["r2"]),
        flow_call("All", ["m0", "m1", "m2", "m3"], ["all"]),
        labels={"r1": "LATENCY", "r2": "LATENCY", "all": "LATENCY"},
    )
    assert groups(graph) == {0: {"M0", "M1", "M2", "M3"}}
    graph.cancel("all")
    graph.is_stale = True
    deduce(graph)
    assert groups(graph) == {0: {"M0", "M1"}, 1: {"M2", "M3"}}


def test_groups_of_later_submits_get_new_numbers() -> None:
    graph = make_graph()
    for name in ("a", "b"):
        submit(
            graph,
            *[flow_call(f"{name}{i}", [], [f"v{name}{i}"]) for i in range(2)],
            flow_call(f"{name}R", [f"v{name}0", f"v{name}1"], [f"{name}r"]),
            labels={f"{name}r": "LATENCY"},
        )
        deduce(graph)
    assert groups(graph) == {0: {"a0", "a1"}, 1: {"b0", "b1"}}


def test_a_loop_of_calls_is_latency_step_by_step() -> None:
    graph = deduced(
        prompt_call("A", "{{output:draft}}{{input:review}}{{output:final}}"),
        flow_call("B", ["draft"], ["review"]),
        labels={"final": "LATENCY"},
    )
    assert latency_calls(graph) == {"A", "B"}
    assert depths(graph) == {"A": 2, "B": 1}


def test_calls_without_a_way_to_the_label_are_left_alone() -> None:
    graph = deduced(
        flow_call("A", [], ["a"]),
        flow_call("B", ["a"], ["b"]),
        flow_call("After", ["b"], ["after"]),
        labels={"b": "LATENCY"},
    )
    graph.fail(graph.live["A"], EngineError("boom").to_info())
    graph.is_stale = True
    assert deduce(graph) == []
    assert latency_calls(graph) == {"A", "B"}


def _reference(calls: dict[str, list[str]], labelled: set[str]) -> tuple[dict[str, int], list[set[str]]]:
    """Depths and groups of single-output calls, by definition; ``calls`` maps each to what it reads."""
    depth: dict[str, int] = {}
    for name in sorted(calls, key=lambda name: -int(name[1:])):
        readers = [depth[reader] for reader in calls if name in calls[reader] and reader in depth]
        if readers or name in labelled:
            depth[name] = max([reader + 1 for reader in readers], default=0)
    latency: set[str] = set()
    found: list[set[str]] = []
    for level in range(max(depth.values(), default=-1) + 1):
        members = {name for name in depth if depth[name] == level} - labelled
        latency |= {name for name in labelled if depth[name] == level}
        readers_of = {name: {r for r in depth if name in calls[r]} for name in members}
        shared = {name for name in members if len(readers_of[name] & latency) > 1}
        alone = {group.pop() for group in _merge(shared, readers_of) if len(group) == 1}
        latency |= alone
        for group in _merge(members - alone, readers_of):
            if len(group) > 1:
                found.append(group)
            else:
                latency |= group
    return depth, found


def _merge(names: set[str], readers_of: dict[str, set[str]]) -> list[set[str]]:
    merged: list[tuple[set[str], set[str]]] = []
    for name in names:
        group, readers = {name}, set(readers_of[name])
        for other in [other for other in merged if other[1] & readers]:
            merged.remove(other)
            group, readers = group | other[0], readers | other[1]
        merged.append((group, readers))
    return [group for group, _ in merged]


def test_random_graphs_agree_with_the_definition() -> None:
    rng = random.Random(7)
    for _ in range(300):
        count = rng.randint(1, 12)
        calls = {
            f"C{i}": [f"C{j}" for j in rng.sample(range(i), rng.randint(0, min(i, 3)))] for i in range(count)
        }
        labelled = set(rng.sample(sorted(calls), rng.randint(1, min(count, 3))))
        graph = deduced(
            *[flow_call(name, [f"v{read}" for read in reads], [f"v{name}"]) for name, reads in calls.items()],
            labels={f"v{name}": "LATENCY" for name in labelled},
        )
        depth, expected = _reference(calls, labelled)
        assert {name: at for name, at in depths(graph).items() if at is not None} == depth
        assert sorted(map(sorted, groups(graph).values())) == sorted(map(sorted, expected))
        grouped = {name for group in expected for name in group}
        assert latency_calls(graph) == set(depth) - grouped


Units = dict[tuple[str, int], set[tuple[str, int]]]  # the step of a call -> the steps that it waits for


def _draw_application(rng: random.Random) -> tuple[list[api.CallBody], list[api.VariableBody], Units]:
    """Calls of one or two steps that read outputs and joins of outputs, some between their two outputs."""
    origins: dict[str, set[tuple[str, int]]] = {}
    calls, joins, units = [], [], Units()
    for number in range(rng.randint(1, 14)):
        name, known = f"C{number}", sorted(origins)
        prompt = ""
        for step in range(rng.randint(1, 2)):
            reads = rng.sample(known, rng.randint(0, min(len(known), 3)))
            units[name, step] = set().union(*(origins[read] for read in reads)) | (
                {(name, 0)} if step else set()
            )
            prompt += (
                "".join(f"{{{{input:{read}}}}} " for read in reads) + f"{{{{output:v{number}_{step}}}}} "
            )
            known = [read for read in known if read not in reads]  # an input is first read once
            origins[f"v{number}_{step}"] = {(name, step)}
        calls.append(prompt_call(name, prompt))
        if rng.random() < 0.4:
            sources = rng.sample(sorted(origins), rng.randint(1, min(len(origins), 3)))
            joins.append(join(f"j{number}", *sources))
            origins[f"j{number}"] = set().union(*(origins[source] for source in sources))
    return calls, joins, units


def _by_definition(
    units: Units, labelled: set[tuple[str, int]]
) -> tuple[dict[str, int], set[str], set[frozenset[str]]]:
    """Depth of each call in the cone, latency-sensitive calls, task groups."""
    readers = {unit: {reader for reader in units if unit in units[reader]} for unit in units}
    depth: dict[tuple[str, int], int] = {}
    for unit in sorted(units, key=lambda unit: (int(unit[0][1:]), unit[1]), reverse=True):
        after = [depth[reader] + 1 for reader in readers[unit] if reader in depth]
        if after or unit in labelled:
            depth[unit] = max(after, default=0)
    latency: set[str] = set()
    group_of: dict[str, frozenset[str]] = {}
    readers = {unit: {reader for reader in readers[unit] if reader in depth} for unit in depth}
    consumers = {str(unit): set(map(str, read)) for unit, read in readers.items()}
    for level in range(max(depth.values(), default=-1) + 1):
        members = [unit for unit in depth if depth[unit] == level]
        latency |= {unit[0] for unit in members if unit in labelled}
        rest = {
            str(unit): unit
            for unit in members
            if unit[0] not in latency and {call for call, _ in readers[unit]} != {unit[0]}
        }
        shared = {key for key, unit in rest.items() if len({call for call, _ in readers[unit]} & latency) > 1}
        alone = {key for group in _merge(shared, consumers) if len(group) == 1 for key in group}
        latency |= {rest[key][0] for key in alone}
        for group in _merge(set(rest) - alone, consumers):
            found = frozenset(rest[key][0] for key in group)
            if len(found) > 1:
                group_of |= dict.fromkeys(found, found)
            else:
                latency |= found
    groups: dict[frozenset[str], set[str]] = {}
    for call, group in group_of.items():
        if call not in latency:
            groups.setdefault(group, set()).add(call)
    latency |= {call for group in groups.values() if len(group) == 1 for call in group}
    calls = {call: max(depth[unit] for unit in depth if unit[0] == call) for call, _ in depth}
    return calls, latency, {frozenset(group) for group in groups.values() if len(group) > 1}


def test_calls_that_think_before_they_answer_are_a_group_too() -> None:
    coders = [prompt_call(f"C{i}", f"{{{{output:thought{i}}}}} {{{{output:code{i}}}}}") for i in range(4)]
    graph = deduced(
        *coders, flow_call("R", [f"code{i}" for i in range(4)], ["result"]), labels={"result": "LATENCY"}
    )
    assert latency_calls(graph) == {"R"}
    assert list(groups(graph).values()) == [{"C0", "C1", "C2", "C3"}]


def test_outputs_that_later_levels_read_leave_a_group_together() -> None:
    """Reviewers read the code, revisers the code, the notes of the coders and the reviews."""
    n = range(3)
    coders = [prompt_call(f"C{i}", f"{{{{output:code{i}}}}} {{{{output:note{i}}}}}") for i in n]
    reviewers = [flow_call(f"R{i}", [f"code{j}" for j in n], [f"review{i}"]) for i in n]
    read = [*(f"note{j}" for j in n), *(f"review{j}" for j in n)]
    revisers = [flow_call(f"V{i}", read, [f"revised{i}"]) for i in n]
    end = flow_call("E", [f"revised{j}" for j in n], ["result"])
    graph = deduced(*coders, *reviewers, *revisers, end, labels={"result": "LATENCY"})
    assert latency_calls(graph) == {"E"}
    assert sorted(map(sorted, groups(graph).values())) == [[f"{x}{i}" for i in n] for x in "CRV"]


def test_steps_joins_and_labels_in_any_order_agree_with_the_definition() -> None:
    rng = random.Random(11)
    num_groups = 0
    for _ in range(400):
        calls, joins, units = _draw_application(rng)
        outputs = [f"v{name[1:]}_{step}" for name, step in units]
        labels = rng.sample(outputs[-4:], rng.randint(1, min(len(outputs), 3)))
        graph = make_graph()
        submit(graph, *calls, variables=joins)
        graph.label(rng.choice(outputs), "THROUGHPUT")
        for label in labels:
            graph.label(label, "LATENCY")
            if rng.random() < 0.5:
                deduce(graph)
        deduce(graph)
        labelled = {(f"C{label[1:].split('_')[0]}", int(label.split("_")[1])) for label in labels}
        depth, latency, found = _by_definition(units, labelled)
        assert {name: at for name, at in depths(graph).items() if name in depth} == depth
        assert {frozenset(group) for group in groups(graph).values()} == found
        assert latency_calls(graph) == latency
        num_groups += len(found)
    assert num_groups > 50


def test_4096_calls_take_less_than_100_ms() -> None:
    shapes = [
        [*[flow_call(f"M{i}", [], [f"v{i}"]) for i in range(4095)], flow_call("R", ["j"], ["r"])],
        [
            *[flow_call(f"C{i}", [f"v{i - 1}"] if i else [], [f"v{i}"]) for i in range(4095)],
            flow_call("R", ["j"], ["r"]),
        ],
        [
            *[flow_call(f"M{i}", [], [f"v{i}"]) for i in range(2048)],
            *[flow_call(f"R{i}", ["j"], ["r" if i == 0 else f"r{i}"]) for i in range(2048)],
        ],
    ]
    for calls in shapes:
        produced = [call.placeholders[-1].semantic_var_id or "" for call in calls]
        sources = [name for name in produced if name.startswith("v")]
        graph = make_graph()
        submit(graph, *calls, variables=[join("j", *sources)], labels={"r": "LATENCY"})
        best = min(_time(graph) for _ in range(3))
        assert best < 0.1, f"{best * 1e3:.0f} ms"
        graph.label("r", "DEADLINE", target_ms=1_000)
        assert min(_time(graph) for _ in range(2)) < 0.2


def _time(graph: Graph) -> float:
    graph.is_stale = True
    started = time.process_time()
    deduce(graph)
    return time.process_time() - started
