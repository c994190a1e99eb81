"""Transforms: a closed list of operators that a value passes from producer to consumer (paper section 4.2).

A chain is compiled at submit, where a malformed operator is a :class:`TransformError`, and applied when the
value exists, where a value that does not fit is a :class:`TransformFailed`. No client code runs here, and
:mod:`parrot.manager.operators` bounds what a chain may take. docs/transforms.md has the list.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from ..api import Transform
from ..errors import TransformError, TransformFailed
from .json_path import Json
from .operators import Apply, Budget, Mismatch, as_text, compile_operator, dump, kind_of
from .slices import run_whole
from .value_bytes import size_of

MAX_EVENT_S = 0.5  # of the thread, which is the loop's
MAX_MEMO_BYTES = 64 * 2**20  # of results that one event keeps for equal chains
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
        return Transformer(max_bytes).apply(self, value, where=where)

    def run(self, value: str, budget: Budget) -> str | Failure:
        """The result, or why there is none."""
        current: Json = value
        failure: Failure | None = None
        for number, (op, operator) in enumerate([*self._operators, ("result", _final_text)], start=1):
            if failure is not None and op != "default":
                continue
            try:
                budget.check_time()
                current = operator(None if failure is not None else current, budget)
                failure = None
            except Mismatch as error:
                failure = Failure(f"transform {number} ({op}): {error}; the value was {_excerpt(current)}")
        return as_text(current) if failure is None else failure


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a chain has no result."""

    reason: str


class Transformer:
    """Passes values through chains for one event. However many consumers a value has, equal chains run once,
    and all of them together take no more than ``MAX_EVENT_S`` of the loop's time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left_s = MAX_EVENT_S
        self._memo_left = MAX_MEMO_BYTES
        self._known: dict[tuple[str, str], str | Failure] = {}

    def apply(self, chain: Chain, value: str, *, where: str) -> str:
        """See :meth:`Chain.apply`."""
        if not chain.key:
            return value
        key = (chain.key, value)
        result = self._known.get(key)
        if result is None:
            budget = Budget(self._max_bytes, self._left_s)
            result = chain.run(value, budget)
            self._left_s -= budget.spent_s
            if isinstance(result, str):
                self._memo_left -= size_of(value) + size_of(result)
            if self._memo_left >= 0:
                self._known[key] = result
        if isinstance(result, Failure):
            raise TransformFailed(f"{where}: {result.reason}")
        return result


_NO_TRANSFORMS = Chain("", ())


def compile_chain(transforms: Sequence[Transform], *, where: str) -> Chain:
    """:func:`compiling_chain` without a pause."""
    return run_whole(compiling_chain(transforms, where=where))


def compiling_chain(transforms: Sequence[Transform], *, where: str) -> Generator[None, None, Chain]:
    """Compile a chain; yields after each operator, since a pattern may take ten milliseconds.

    Raises :class:`TransformError` naming ``where``, the operator and its place in the chain."""
    if not transforms:
        return _NO_TRANSFORMS
    operators = []
    for number, transform in enumerate(transforms, start=1):
        try:
            operators.append((transform.op, compile_operator(transform)))
        except ValueError as error:
            raise TransformError(f"{where}: transform {number} ({transform.op}): {error}") from None
        yield
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
