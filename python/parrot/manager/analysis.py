"""Objective deduction: from the labels of a few variables to an objective for every call (paper section 5.2).

In the cone of what somebody waits for (:mod:`parrot.manager.cone`), level by level from the labelled
variables:

* the producer of a labelled variable is latency-sensitive;
* so is a call that alone at its depth feeds several latency-sensitive ones (R3 of the paper's figure 9);
* of the others, calls at one depth whose consumers intersect, transitively, form a task group: inside it
  throughput counts, since only the group's completion time matters to its consumers;
* a call that is in no group is alone on the critical path: latency.

A call's steps are levels of their own; one that only the call's next step needs goes with that.

Somebody waits for what is labelled LATENCY, TTFT or TPOT, and for a DEADLINE that has come near. Times are
carried down by :mod:`parrot.manager.critical_path`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Hashable, Mapping, Set

from .call import NO_TARGETS, Call, Targets
from .cone import Cone, Node, Unit, labelled_nodes
from .critical_path import CriticalPath
from .demand import Demand, earliest
from .graph import Graph
from .pace import Pace
from .slices import run_whole
from .variable import Variable

_PATIENT = ("THROUGHPUT", "DEADLINE")


def deduce(graph: Graph, *, now_us: int = 0, pace: Pace | None = None) -> list[Call]:
    """:func:`deducing` without a pause."""
    return run_whole(deducing(graph, now_us=now_us, pace=pace))


def deducing(graph: Graph, *, now_us: int = 0, pace: Pace | None = None) -> Generator[None, None, list[Call]]:
    """Bring objective, task group, depth and targets of the unfinished calls up to date with the labels.

    Returns the calls of which one of these changed. Costs nothing while ``graph.is_stale`` is False, else
    time linear in the session's live calls: call it once for labels that arrive together. Calls outside every
    cone keep what they have, at first THROUGHPUT. ``graph.review_us`` is when it has to run again even
    without a new label, since a deadline will have come near.

    It yields now and then (:mod:`parrot.manager.slices`), and the graph may go on meanwhile; what is found is
    set in one go at the end.
    """
    if not graph.is_stale:
        return []
    graph.is_stale = False
    labels = labelled_nodes(graph)
    path = None
    if any(demand.has_time for demand in labels.values()):
        path = CriticalPath(labels, pace=pace or Pace(), now_us=now_us)
        yield from path.measuring()
    graph.review_us = None if path is None else path.review_us
    urgent = set() if path is None else path.urgent
    latency = {node for node, demand in labels.items() if demand.criteria not in _PATIENT or node in urgent}
    targets = _targets(labels, path)
    cone, patient = _cone_of(latency, path), _cone_of(labels.keys() - latency, path)
    yield from cone.growing()
    yield from patient.growing()
    changed = yield from _Levels(graph, cone, targets).classifying()
    depths: dict[Call, int] = {}
    for (call, _), depth in patient.unit_depths():
        if call not in cone.calls:
            depths[call] = max(depth, depths.get(call, 0))
    for call, depth in depths.items():
        if not call.ended and graph.set_objective(
            call,
            call.objective,
            task_group=call.task_group,
            depth=depth,
            targets=targets.get(call, NO_TARGETS),
        ):
            changed.append(call)
    return changed


def _cone_of(labelled: Set[Node], path: CriticalPath | None) -> Cone:
    return path.cone if path is not None and path.cone.labelled == labelled else Cone(labelled)


def _targets(labels: Mapping[Node, Demand], path: CriticalPath | None) -> dict[Call, Targets]:
    """By when each call has to start its next step, and what a token of its labelled outputs may take."""
    start_by_us: dict[Call, int] = {}
    for (call, _), time_us in path.start_by_us.items() if path is not None else ():
        start_by_us[call] = min(time_us, start_by_us.get(call, time_us))
    per_token_us: dict[Call, int | None] = {}
    for node, demand in labels.items():
        producer = node.producer if isinstance(node, Variable) else node[0]
        if producer is not None and demand.per_token_us is not None:
            per_token_us[producer] = earliest(demand.per_token_us, per_token_us.get(producer))
    return {
        call: Targets(start_by_us.get(call), per_token_us.get(call))
        for call in start_by_us.keys() | per_token_us.keys()
    }


class _Levels:
    """The LATENCY cone, classified level by level from the labelled variables upwards."""

    def __init__(self, graph: Graph, cone: Cone, targets: Mapping[Call, Targets]) -> None:
        self._graph = graph
        self._cone = cone
        self._targets = targets
        self._latency: set[Call] = set()
        self._group: dict[Call, int] = {}
        self._taken_groups: set[int] = set()
        self._latency_readers: dict[Variable, frozenset[Call]] = {}

    def classifying(self) -> Generator[None, None, list[Call]]:
        """Set the calls' objectives, all at the end; returns those that changed."""
        units: dict[int, list[Unit]] = defaultdict(list)
        variables: dict[int, list[Variable]] = defaultdict(list)
        depths: dict[Call, int] = {}
        for node, depth in self._cone.depth.items():
            if isinstance(node, Variable):
                variables[depth].append(node)
                continue
            units[depth].append(node)
            call, index = node
            if index >= call.next_step:
                depths[call] = max(depth, depths.get(call, 0))
        for depth in sorted(units):
            yield
            for variable in variables[depth]:
                self._latency_readers[variable] = self._count_readers(variable)
            self._classify_level(sorted(units[depth], key=lambda unit: (unit[0].call_id, unit[1])))
        self._dissolve_groups_of_one()
        return [call for call, depth in depths.items() if not call.ended and self._update(call, depth)]

    def _update(self, call: Call, depth: int) -> bool:
        targets = self._targets.get(call, NO_TARGETS)
        if call in self._latency:
            return self._graph.set_objective(call, "LATENCY", depth=depth, targets=targets)
        group = self._group.get(call)
        return self._graph.set_objective(call, "THROUGHPUT", task_group=group, depth=depth, targets=targets)

    def _classify_level(self, units: list[Unit]) -> None:
        open_units = []
        for unit in units:
            if self._is_labelled(unit) or unit[0] in self._latency:
                self._latency.add(unit[0])
            elif not self._feeds_only_its_call(unit):
                open_units.append(unit)
        if len(open_units) > 1:
            shared = [unit for unit in open_units if len(self._count_readers(unit)) > 1]
            alone = {group[0] for group in self._components(shared) if len(group) == 1}
            self._latency.update(call for call, _ in alone)
            open_units = [unit for unit in open_units if unit not in alone]
        for group in self._components(open_units):
            members = list(dict.fromkeys(call for call, _ in group))
            if len(members) == 1:
                self._latency.add(members[0])
            else:
                self._group.update(dict.fromkeys(members, self._group_id(members)))

    def _dissolve_groups_of_one(self) -> None:
        """A member that another step of its call made latency-sensitive may leave one alone."""
        sizes = Counter(group for call, group in self._group.items() if call not in self._latency)
        self._latency.update(call for call, group in self._group.items() if sizes[group] == 1)

    def _is_labelled(self, unit: Unit) -> bool:
        call, index = unit
        labelled = self._cone.labelled
        return unit in labelled or call.steps[index].output.binding.variable in labelled

    def _feeds_only_its_call(self, unit: Unit) -> bool:
        readers = self._cone.readers[unit]
        return all(not isinstance(reader, Variable) and reader[0] is unit[0] for reader in readers)

    def _count_readers(self, node: Node) -> frozenset[Call]:
        """Up to two of the latency-sensitive calls that read a node, through derived variables too."""
        found: set[Call] = set()
        for reader in self._cone.readers.get(node, ()):
            if isinstance(reader, Variable):
                found |= self._latency_readers[reader]
            elif reader[0] in self._latency:
                found.add(reader[0])
            if len(found) > 1:
                break
        return frozenset(found)

    def _components(self, units: list[Unit]) -> list[list[Unit]]:
        """Units of one level by common consumers, transitively; in order of their first members."""
        if len(units) < 2:
            return [units] if units else []
        sets = _DisjointSets()
        for unit in units:
            stack: list[Node] = [unit]
            while stack:
                node = stack.pop()
                for reader in self._cone.readers.get(node, ()):
                    if isinstance(reader, Variable) and reader not in sets:
                        stack.append(reader)
                    sets.unite(node, reader)
        components: dict[Hashable, list[Unit]] = {}
        for unit in units:
            components.setdefault(sets.find(unit), []).append(unit)
        return list(components.values())

    def _group_id(self, members: list[Call]) -> int:
        """A group keeps its number while it has members from before."""
        known = {call.task_group for call in members if call.task_group is not None} - self._taken_groups
        group = min(known, default=self._graph.next_task_group)
        self._graph.next_task_group = max(self._graph.next_task_group, group + 1)
        self._taken_groups.add(group)
        return group


class _DisjointSets:
    """Union-find with path halving; elements come into being when they are named."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def __contains__(self, element: Hashable) -> bool:
        return element in self._parent

    def find(self, element: Hashable) -> Hashable:
        parent = self._parent
        above = parent.setdefault(element, element)
        while above != element:
            parent[element] = parent[above]
            element, above = above, parent[parent[element]]
        return element

    def unite(self, one: Hashable, other: Hashable) -> None:
        self._parent[self.find(one)] = self.find(other)
