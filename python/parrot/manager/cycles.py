"""Refuse a submit whose calls would wait for their own outputs.

The check is at the grain of steps: a call may well read, after an output, a value that other calls made from
that output (a value fed round a loop of calls).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from ..errors import CycleError
from .call import Call
from .variable import Variable

if TYPE_CHECKING:
    from .draft import Draft

_Step = tuple[Call, int]
_Node = Variable | _Step
_MAX_NAMES = 20  # of a cycle, in a message


def checking_cycles(draft: Draft) -> Generator[None, None, None]:
    """Raise :class:`CycleError` with the path of names if inserting the draft would close a cycle; yields in
    between. No other request gives variables of earlier submits their origins meanwhile.

    Time is linear in the draft; earlier submits are looked at only if the draft gives one of their variables
    its origin, since otherwise nothing old can depend on anything new.
    """
    yield from _Search(draft).running()


class _Search:
    """Depth-first along dependencies. ``_path`` is the present path, ``_done`` what leads to no cycle."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._done: set[_Node] = set()
        self._path: list[tuple[_Node, Iterator[_Node]]] = []
        self._on_path: set[_Node] = set()

    def running(self) -> Generator[None, None, None]:
        for variable in (*self._draft.derivations, *self._draft.producers):
            self._explore(variable)
            yield
        for call in self._draft.calls:
            self._explore((call, len(call.steps) - 1))
            yield

    def _explore(self, start: _Node) -> None:
        self._enter(start)
        while self._path:
            node, dependencies = self._path[-1]
            following = next(dependencies, None)
            if following is None:
                self._path.pop()
                self._on_path.remove(node)
                self._done.add(node)
            else:
                self._enter(following)

    def _enter(self, node: _Node) -> None:
        if node in self._on_path:
            raise CycleError(f"a call would wait for its own output: {self._describe(node)}")
        if node not in self._done:
            self._path.append((node, self._dependencies(node)))
            self._on_path.add(node)

    def _dependencies(self, node: _Node) -> Iterator[_Node]:
        if isinstance(node, Variable):
            return self._origin(node)
        return _step_inputs(*node)

    def _origin(self, variable: Variable) -> Iterator[_Node]:
        if not variable.pending or variable in self._draft.values:
            return
        is_new = variable.id in self._draft.variables
        if not is_new and not self._draft.reaches_old:
            return
        derivation = self._draft.derivations.get(variable) or variable.derivation
        if derivation is not None:
            yield from (source.variable for source in derivation.sources)
        elif variable in self._draft.producers:
            yield self._draft.producers[variable]
        elif variable.producer is not None:
            yield (variable.producer, variable.producer_step)

    def _describe(self, end: _Node) -> str:
        """The cycle in the direction in which values would flow."""
        path = [node for node, _ in self._path]
        names = [_name(node) for node in reversed([*path[path.index(end) :], end])]
        names = [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]
        if len(names) > _MAX_NAMES:
            names[_MAX_NAMES - 1 : -1] = [f"({len(names) - _MAX_NAMES} more)"]
        return " -> ".join(names)


def _step_inputs(call: Call, index: int) -> Iterator[_Node]:
    if index > 0:
        yield (call, index - 1)
    for binding in call.steps[index].first_inputs:
        if binding.variable is not None:
            yield binding.variable


def _name(node: _Node) -> str:
    return f"variable {node.id}" if isinstance(node, Variable) else node[0].name
