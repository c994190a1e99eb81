"""Deduction on random graphs, against what the definition says of each."""

from __future__ import annotations

import random

from deduction_harness import deduced, depths, groups, latency_calls
from graph_builder import flow_call, join, make_graph, prompt_call, submit
from parrot import api
from parrot.manager.analysis import deduce


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
