"""JSON paths: jsonpath-ng parses them, a bounded lazy walk evaluates them.

``find()`` of the library collects every match and takes time that grows with a power of the number of ``..``;
a transform wants the first match, within a budget that no document or path can exceed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

from jsonpath_ng import jsonpath as ast
from jsonpath_ng.exceptions import JSONPathError
from jsonpath_ng.parser import parse

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_VISITED_NODES = 50_000
_NODES_PER_CHECK = 256
MAX_STEPS = 64  # the parser takes time that grows with their square
_STEP = re.compile(r"[.\[,|&(]")


class PathError(ValueError):
    """The path does not parse, or uses a selector that is not supported."""


class PathBudgetExceeded(ValueError):
    """The path had no match among the first ``MAX_VISITED_NODES`` nodes it looked at."""


@functools.lru_cache(maxsize=1024)
def compile_path(path: str) -> ast.JSONPath:
    """Parse a path of names, indices, slices, ``*`` and ``..``; raises :class:`PathError`.

    Of what may begin a step (``.``, ``[``, a comma, also inside quotes) it has up to ``MAX_STEPS``."""
    num_steps = sum(1 for _ in _STEP.finditer(path))
    if num_steps > MAX_STEPS:
        raise PathError(f"{num_steps} steps are above the limit of {MAX_STEPS}")
    try:
        tree = parse(path)
    except (JSONPathError, RecursionError, ValueError) as error:
        raise PathError(str(error) or "nested too deeply") from None
    _check(tree)
    return tree


def _nothing() -> None:
    """Nobody looks at the time."""


def first_match(
    tree: ast.JSONPath, document: Json, check_time: Callable[[], None] = _nothing
) -> tuple[Json] | None:
    """The first value that a compiled path selects, in document order, as a 1-tuple; None if there is none.
    ``check_time`` is called now and then, and may raise.

    Raises :class:`PathBudgetExceeded`.
    """
    match = next(_walk(tree, document, document, _Meter(check_time)), _NOTHING)
    return None if isinstance(match, _Nothing) else (match,)


class _Nothing:
    pass


_NOTHING = _Nothing()


class _Meter:
    def __init__(self, check_time: Callable[[], None]) -> None:
        self.num_left = MAX_VISITED_NODES
        self._check_time = check_time

    def visit(self) -> None:
        self.num_left -= 1
        if self.num_left % _NODES_PER_CHECK == 0:
            self._check_time()
        if self.num_left < 0:
            raise PathBudgetExceeded(f"no match among the first {MAX_VISITED_NODES} nodes")


def _check(tree: ast.JSONPath) -> None:
    if isinstance(tree, ast.Child | ast.Descendants):
        _check(tree.left)
        _check(tree.right)
    elif not isinstance(tree, ast.Root | ast.This | ast.Fields | ast.Index | ast.Slice | ast.Wildcard):
        raise PathError(f"{type(tree).__name__.lower()!r} is not supported")


def _walk(tree: ast.JSONPath, node: Json, root: Json, meter: _Meter) -> Iterator[Json]:
    if isinstance(tree, ast.Child):
        for left in _walk(tree.left, node, root, meter):
            yield from _walk(tree.right, left, root, meter)
    elif isinstance(tree, ast.Descendants):
        for left in _walk(tree.left, node, root, meter):
            for below in _preorder(left, meter):
                yield from _walk(tree.right, below, root, meter)
    elif isinstance(tree, ast.Root):
        yield root
    elif isinstance(tree, ast.This):
        yield node
    else:
        for child in _select(tree, node):
            meter.visit()
            yield child


def _preorder(node: Json, meter: _Meter) -> Iterator[Json]:
    """The node and everything below it; the stack is explicit, since documents may be deep."""
    stack = [iter((node,))]
    while stack:
        try:
            current = next(stack[-1])
        except StopIteration:
            stack.pop()
            continue
        meter.visit()
        yield current
        stack.append(_children(current))


def _children(node: Json) -> Iterator[Json]:
    if isinstance(node, dict):
        return iter(node.values())
    return iter(node) if isinstance(node, list) else iter(())


def _select(tree: ast.JSONPath, node: Json) -> Iterator[Json]:
    if isinstance(tree, ast.Wildcard):
        return _children(node)
    if isinstance(node, dict) and isinstance(tree, ast.Fields):
        return iter([node[name] for name in tree.fields if name in node])
    if isinstance(node, list) and isinstance(tree, ast.Index):
        return iter([node[index] for index in tree.indices if -len(node) <= index < len(node)])
    if isinstance(node, list) and isinstance(tree, ast.Slice) and tree.step != 0:
        return iter(node[tree.start : tree.end : tree.step])
    return iter(())
