"""The cone of an objective: everything that the variables labelled with it still need.

Its nodes are units, that is the steps of calls, and variables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator

from .call import Call
from .demand import Demand
from .graph import Graph
from .variable import Variable

NODES_AT_ONCE = 64

Unit = tuple[Call, int]
Node = Unit | Variable


def labelled_nodes(graph: Graph) -> dict[Node, Demand]:
    """The pending variables that somebody has labelled, and the last steps of calls labelled at submit."""
    found: dict[Node, Demand] = {}
    for call in graph.live.values():
        for binding in call.outputs.values():
            if binding.variable.demand is not None and binding.variable.pending:
                found[binding.variable] = binding.variable.demand
        if call.demand is not None:
            found[(call, call.num_wanted_steps - 1)] = call.demand
    for variable in graph.variables.values():
        if variable.demand is not None and variable.derivation is not None and variable.pending:
            found[variable] = variable.demand
    return found


class Cone:
    """What ``labelled`` nodes still need, with depths: of a unit, the number of units after it on the longest
    path to a labelled node.

    Finished producers of values that a unit reads are included as leaves, so that a task group stays one
    while its members finish. ``readers_first`` has every node before what it depends on.
    """

    def __init__(self, labelled: Iterable[Node]) -> None:
        """Only the labelled nodes; :meth:`growing` finds the others."""
        self.labelled = set(labelled)
        self.readers: dict[Node, list[Node]] = defaultdict(list)
        self.readers_first: list[Node] = []
        self.depth: dict[Node, int] = {}
        self.calls: set[Call] = set()

    def growing(self) -> Generator[None, None, None]:
        """Find all nodes and their depths; yields now and then (:mod:`parrot.manager.slices`). The graph may
        go on meanwhile: values that come only take dependencies away, and submits never close a cycle."""
        if self.readers_first:
            return
        yield from self._order()
        yield from self._measure()
        self.calls = {node[0] for node in self.depth if isinstance(node, tuple)}

    def unit_depths(self) -> Iterator[tuple[Unit, int]]:
        """Every unit with its depth."""
        return ((node, depth) for node, depth in self.depth.items() if isinstance(node, tuple))

    def _order(self) -> Generator[None, None, None]:
        order = self.readers_first
        seen: set[Node] = set()
        stack: list[tuple[Node, Iterator[Node]]] = []
        for root in self.labelled:
            if root not in seen:
                seen.add(root)
                stack.append((root, dependencies(root)))
            while stack:
                node, below = stack[-1]
                dependency = next(below, None)
                if dependency is None:
                    stack.pop()
                    order.append(node)
                    if len(order) % NODES_AT_ONCE == 0:
                        yield
                    continue
                self.readers[dependency].append(node)
                if dependency not in seen:
                    seen.add(dependency)
                    stack.append((dependency, dependencies(dependency)))
        order.reverse()

    def _measure(self) -> Generator[None, None, None]:
        for number, node in enumerate(self.readers_first):
            if number % NODES_AT_ONCE == 0:
                yield
            depth = 0
            for reader in self.readers.get(node, ()):
                step = 1 if isinstance(reader, tuple) else 0
                depth = max(depth, self.depth[reader] + step)
            self.depth[node] = depth


def dependencies(node: Node) -> Iterator[Node]:
    """What a node waits for: a unit for the step before it and its inputs, a variable for its origin."""
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
