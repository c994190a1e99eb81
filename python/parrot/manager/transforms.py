"""Transforms: a closed list of operators that a value passes from producer to consumer (paper section 4.2).

A chain is compiled at submit, where a malformed operator is a :class:`TransformError`, and applied when the
value exists, where a value that does not fit is a :class:`TransformFailed`. No client code runs here, and
:mod:`parrot.manager.operators` bounds what a chain may take. docs/transforms.md has the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..api import Transform
from ..errors import TransformError, TransformFailed
from .json_path import Json
from .operators import Apply, Budget, Mismatch, as_text, compile_operator, dump, kind_of

_EXCERPT_CHARS = 80


@dataclass(frozen=True, slots=True)
class Chain:
    """Compiled transforms. Equal chains have equal ``key``; the empty key is the chain that does nothing."""

    key: str
    _operators: tuple[tuple[str, Apply], ...]

    def apply(self, value: str, *, where: str, max_bytes: int) -> str:
        """Pass a value through all operators. Between them it may be a list, an object or a number; at the
        end text stays as it is and anything else becomes compact JSON.

        When an operator fails, the chain goes on at the next ``default``. Without one it raises
        :class:`TransformFailed` naming ``where``, the operator, its place in the chain, counted from 1, and
        an excerpt.
        """
        if not self._operators:
            return value
        current: Json = value
        budget = Budget(max_bytes)
        failed: str | None = None
        for number, (op, operator) in enumerate([*self._operators, ("result", _final_text)], start=1):
            if failed is not None and op != "default":
                continue
            try:
                budget.check_time()
                current = operator(None if failed is not None else current, budget)
                failed = None
            except Mismatch as error:
                failed = f"{where}: transform {number} ({op}): {error}; the value was {_excerpt(current)}"
        if failed is not None:
            raise TransformFailed(failed)
        return as_text(current)


_NO_TRANSFORMS = Chain("", ())


def compile_chain(transforms: Sequence[Transform], *, where: str) -> Chain:
    """Raises :class:`TransformError` naming ``where``, the operator and its place in the chain."""
    if not transforms:
        return _NO_TRANSFORMS
    operators = []
    for number, transform in enumerate(transforms, start=1):
        try:
            operators.append((transform.op, compile_operator(transform)))
        except ValueError as error:
            raise TransformError(f"{where}: transform {number} ({transform.op}): {error}") from None
    return Chain("".join(transform.model_dump_json() for transform in transforms), tuple(operators))


def _excerpt(value: Json) -> str:
    try:
        text = dump(value)
    except Mismatch:
        return kind_of(value)
    return repr(text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "...")


def _final_text(value: Json, budget: Budget) -> Json:
    text = dump(value)
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise Mismatch("the result is not Unicode text") from None
    budget.check_size(num_bytes)
    return text
