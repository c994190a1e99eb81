"""Who will use a prompt's beginning again, and how soon: what eviction is told (paper section 5.3).

A prompt is a path of *part keys*. Calls whose paths begin alike share those parts whether or not their
variables have values yet: a key names a variable, not its text, so that it never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

CallT = TypeVar("CallT", bound=Hashable)
_CALLS_LOOKED_AT = 8  # of those that share a prefix, for the nearest; submitted in an order they can run in


class NextUse(NamedTuple):
    """The longest beginning of a prompt that unfinished calls share: ``num_parts`` of its parts, by
    ``remaining_uses`` calls, the nearest of which runs in ``steps`` steps of the graph."""

    num_parts: int
    remaining_uses: int
    steps: int


NO_USE = NextUse(0, 0, 0)


@dataclass(eq=False, slots=True)
class _Node(Generic[CallT]):
    """The first ``depth`` parts of some prompts, and the unfinished calls that have them, in order."""

    parent: _Node[CallT] | None
    key: Hashable
    depth: int
    children: dict[Hashable, _Node[CallT]] = field(default_factory=dict)
    calls: dict[CallT, None] = field(default_factory=dict)


class PromptTrie(Generic[CallT]):
    """The prompts of a session's unfinished calls by part. Work is linear in the parts of one prompt."""

    def __init__(self) -> None:
        self._root: _Node[CallT] = _Node(None, None, 0)

    def add(self, call: CallT, keys: Sequence[Hashable]) -> None:
        """An unfinished call with this prompt."""
        node = self._root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key, node.depth + 1)
            child.calls[call] = None
            node = child

    def remove(self, call: CallT, keys: Sequence[Hashable]) -> None:
        """The call has finished; unknown ones are ignored."""
        path = self._find(keys)
        for node in path:
            node.calls.pop(call, None)
        for node in reversed(path):
            if not node.calls and node.parent is not None:
                del node.parent.children[node.key]

    def next_use(self, keys: Sequence[Hashable], steps_to: Callable[[CallT], int]) -> NextUse:
        """What is still to come of a prompt's beginning; ``steps_to`` a call until it runs."""
        path = self._find(keys)
        if not path:
            return NO_USE
        calls = path[-1].calls
        return NextUse(len(path), len(calls), min(map(steps_to, islice(calls, _CALLS_LOOKED_AT))))

    def _find(self, keys: Sequence[Hashable]) -> list[_Node[CallT]]:
        """The nodes of a prompt's beginning, as far as unfinished calls have it."""
        path: list[_Node[CallT]] = []
        node = self._root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path
