"""Objective deduction: from the labels of a few variables to an objective for every call (paper section 5.2).

The *cone* of an objective is everything that its labelled variables still need. Its nodes are units, that is
the steps of calls, and variables; derived variables are transparent. Within the LATENCY cone the depth of a
unit is the number of units after it on the longest path to a labelled variable. Level by level from there:

* the producer of a labelled variable is latency-sensitive;
* so is a call that alone at its depth feeds several latency-sensitive ones (R3 of the paper's figure 9);
* of the others, calls at one depth whose consumers intersect, transitively, form a task group: inside it
  throughput counts, since only the group's completion time matters to its consumers;
* a call that is in no group is alone on the critical path: latency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from ..api import Criteria
from .call import Call
from .graph import Graph
from .variable import Variable

Unit = tuple[Call, int]
Node = Unit | Variable


def deduce(graph: Graph) -> list[Call]:
    """Bring objective, task group and depth of the unfinished calls up to date with the labels.

    Returns the calls of which one of these changed. Costs nothing while ``graph.is_stale`` is False, else
    time linear in the session's live calls: call it once for labels that arrive together. Calls outside every
    cone keep what they have, at first THROUGHPUT.
    """
    if not graph.is_stale:
        return []
    graph.is_stale = False
    latency = _Cone(graph, "LATENCY")
    changed = _Levels(graph, latency).classify()
    throughput = _Cone(graph, "THROUGHPUT")
    depths: dict[Call, int] = {}
    for (call, _), depth in throughput.unit_depths():
        if call not in latency.calls:
            depths[call] = max(depth, depths.get(call, 0))
    for call, depth in depths.items():
        if not call.ended and graph.set_objective(
            call, call.objective, task_group=call.task_group, depth=depth
        ):
            changed.append(call)
    return changed


class _Cone:
    """What the variables labelled with one objective still need, with depths.

    Finished producers of values that a unit reads are included as leaves, so that a task group stays one
    while its members finish.
    """

    def __init__(self, graph: Graph, criteria: Criteria) -> None:
        self.labelled: set[Node] = {
            variable
            for call in graph.live.values()
            for variable in (binding.variable for binding in call.outputs.values())
            if variable.criteria == criteria and variable.pending
        }
        self.labelled |= {
            variable
            for variable in graph.variables.values()
            if variable.derivation and variable.criteria == criteria and variable.pending
        }
        self.labelled |= {
            (call, call.num_wanted_steps - 1) for call in graph.live.values() if call.label == criteria
        }
        self.readers: dict[Node, list[Node]] = defaultdict(list)
        self.depth: dict[Node, int] = {}
        self._measure(self._readers_first())
        self.calls = {node[0] for node in self.depth if isinstance(node, tuple)}

    def unit_depths(self) -> Iterator[tuple[Unit, int]]:
        """Every unit with its depth."""
        return ((node, depth) for node, depth in self.depth.items() if isinstance(node, tuple))

    def _readers_first(self) -> list[Node]:
        """All nodes, each before what it depends on; fills ``readers``."""
        order: list[Node] = []
        seen: set[Node] = set()
        stack: list[tuple[Node, Iterator[Node]]] = []
        for root in self.labelled:
            if root not in seen:
                seen.add(root)
                stack.append((root, _dependencies(root)))
            while stack:
                node, dependencies = stack[-1]
                below = next(dependencies, None)
                if below is None:
                    stack.pop()
                    order.append(node)
                    continue
                self.readers[below].append(node)
                if below not in seen:
                    seen.add(below)
                    stack.append((below, _dependencies(below)))
        order.reverse()
        return order

    def _measure(self, readers_first: list[Node]) -> None:
        for node in readers_first:
            depth = 0
            for reader in self.readers.get(node, ()):
                step = 1 if isinstance(reader, tuple) else 0
                depth = max(depth, self.depth[reader] + step)
            self.depth[node] = depth


def _dependencies(node: Node) -> Iterator[Node]:
    if isinstance(node, tuple):
        return _unit_dependencies(*node)
    return _origin(node)


def _unit_dependencies(call: Call, index: int) -> Iterator[Node]:
    if index < call.next_step:
        return
    if index > call.next_step:
        yield (call, index - 1)
    for binding in call.steps[index].first_inputs:
        if binding.variable is not None:
            yield binding.variable


def _origin(variable: Variable) -> Iterator[Node]:
    if variable.producer is not None:
        yield (variable.producer, variable.producer_step)
    elif variable.derivation is not None and variable.pending:
        yield from dict.fromkeys(variable.sources)


class _Levels:
    """The LATENCY cone, classified level by level from the labelled variables upwards."""

    def __init__(self, graph: Graph, cone: _Cone) -> None:
        self._graph = graph
        self._cone = cone
        self._latency: set[Call] = set()
        self._group: dict[Call, int] = {}
        self._taken_groups: set[int] = set()
        self._latency_readers: dict[Variable, frozenset[Call]] = {}

    def classify(self) -> list[Call]:
        """Set the calls' objectives; returns those that changed."""
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
            for variable in variables[depth]:
                self._latency_readers[variable] = self._count_readers(variable)
            self._classify_level(sorted(units[depth], key=lambda unit: (unit[0].call_id, unit[1])))
        return [call for call, depth in depths.items() if not call.ended and self._update(call, depth)]

    def _update(self, call: Call, depth: int) -> bool:
        if call in self._latency:
            return self._graph.set_objective(call, "LATENCY", depth=depth)
        group = self._group.get(call)
        return self._graph.set_objective(call, "THROUGHPUT", task_group=group, depth=depth)

    def _classify_level(self, units: list[Unit]) -> None:
        open_units = []
        for unit in units:
            if self._is_labelled(unit) or unit[0] in self._latency:
                self._latency.add(unit[0])
            else:
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

    def _is_labelled(self, unit: Unit) -> bool:
        call, index = unit
        labelled = self._cone.labelled
        return unit in labelled or call.steps[index].output.binding.variable in labelled

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
