"""Who will use a prompt's beginning again, and how soon: what eviction is told (paper section 5.3).

A prompt is a path of *part keys*. Calls whose paths begin alike share those parts whether or not their
variables have values yet: a key names a variable, not its text, so that it never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
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
    """The first ``depth`` parts of some prompts, and the unfinished calls that have them, in order, each with
    its whole prompt. ``children`` None: one call, whose further parts have no nodes yet. A node does not know
    its parent: a trie has no cycles, and is freed with its session."""

    depth: int
    calls: dict[CallT, Sequence[Hashable]]
    children: dict[Hashable, _Node[CallT]] | None = None


class PromptTrie(Generic[CallT]):
    """The prompts of a session's unfinished calls by part. Work is linear in the parts of one prompt; nodes
    exist only for what calls share, and one more per call."""

    def __init__(self) -> None:
        self._root: _Node[CallT] = _Node(0, {}, {})

    def add(self, call: CallT, keys: Sequence[Hashable]) -> None:
        """An unfinished call with this prompt."""
        node = self._root
        for key in keys:
            children = _expanded(node)
            child = children.get(key)
            if child is None:
                children[key] = _Node(node.depth + 1, {call: keys})
                return
            node = child
            _expanded(node)
            node.calls[call] = keys

    def remove(self, call: CallT, keys: Sequence[Hashable]) -> None:
        """The call has finished; unknown ones are ignored."""
        path = [self._root, *self._find(keys)]
        for parent, node in reversed(list(pairwise(path))):
            node.calls.pop(call, None)
            if not node.calls:
                del _expanded(parent)[keys[parent.depth]]

    def next_use(
        self,
        keys: Sequence[Hashable],
        steps_to: Callable[[CallT], int],
        nearest: dict[object, int] | None = None,
    ) -> NextUse:
        """What is still to come of a prompt's beginning; ``steps_to`` a call until it runs. ``nearest``
        remembers what was found, for prompts that are looked up while nothing changes."""
        path = self._find(keys)
        if not path:
            return NO_USE
        node = path[-1]
        known = nearest.get(node) if nearest is not None else None
        if known is None:
            known = min(map(steps_to, islice(node.calls, _CALLS_LOOKED_AT)))
            if nearest is not None:
                nearest[node] = known
        return NextUse(_shared_parts(node, keys), len(node.calls), known)

    def _find(self, keys: Sequence[Hashable]) -> list[_Node[CallT]]:
        """The nodes of a prompt's beginning, as far as unfinished calls have it."""
        path: list[_Node[CallT]] = []
        node = self._root
        for key in keys:
            child = None if node.children is None else node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path


def _expanded(node: _Node[CallT]) -> dict[Hashable, _Node[CallT]]:
    """The node's children, made for its one call if they do not exist."""
    if node.children is None:
        depth = node.depth
        node.children = {
            keys[depth]: _Node(depth + 1, {call: keys})
            for call, keys in node.calls.items()
            if len(keys) > depth
        }
    return node.children


def _shared_parts(node: _Node[CallT], keys: Sequence[Hashable]) -> int:
    """How many parts of a prompt whose last node is ``node`` its calls share."""
    if node.children is not None:
        return node.depth
    (other,) = node.calls.values()
    num_parts = node.depth
    for one, two in zip(keys[num_parts:], other[num_parts:], strict=False):
        if one != two:
            break
        num_parts += 1
    return num_parts
