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
from .operators import Apply, Budget, Mismatch, TooHeavy, as_text, compile_operator, dump, kind_of
from .slices import run_whole
from .value_bytes import size_of

MAX_EVENT_S = 0.5  # of processor time, of the loop's thread and of the process for heavy chains
SLICE_S = 0.005  # of light chains, between two turns of the loop
MAX_MEMO_BYTES = 64 * 2**20  # of results that one event keeps for equal chains
_EXCERPT_CHARS = 80


@dataclass(frozen=True, slots=True)
class Chain:
    """Compiled transforms. ``key`` is their JSON, equal for equal chains; empty for the one that does
    nothing."""

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
                if isinstance(current, str):
                    budget.weigh(num_chars=len(current))
                current = operator(None if failure is not None else current, budget)
                failure = None
            except Mismatch as error:
                failure = Failure(f"transform {number} ({op}): {error}; the value was {_excerpt(current)}")
        return as_text(current) if failure is None else failure


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a chain has no result."""

    reason: str


@dataclass(frozen=True, slots=True)
class Work:
    """A chain to apply elsewhere, and what it may take."""

    chain: Chain
    value: str
    max_bytes: int
    left_s: float


@dataclass(frozen=True, slots=True)
class Need:
    """A result that is not there yet: ask for it in a later turn of the loop or, if it ``is_heavy``, when the
    :meth:`Transformer.work` for it is done."""

    chain: Chain
    value: str
    is_heavy: bool


class Deferred(Exception):
    """The :class:`Need` comes first."""

    def __init__(self, need: Need) -> None:
        self.need = need


class Transformer:
    """Passes values through chains for one event. However many consumers a value has, equal chains run once,
    and all of them together take no more than ``MAX_EVENT_S``.

    One that ``may_defer`` takes ``SLICE_S`` of its thread at a time, and nothing that is heavy."""

    def __init__(self, max_bytes: int, *, may_defer: bool = False) -> None:
        self._max_bytes = max_bytes
        self._may_defer = may_defer
        self._left_s = MAX_EVENT_S
        self._slice_left_s = SLICE_S
        self._memo_left = MAX_MEMO_BYTES
        self._known: dict[tuple[str, str], str | Failure] = {}
        self._done: tuple[tuple[str, str], str | Failure] | None = None  # of the last work

    def apply(self, chain: Chain, value: str, *, where: str) -> str:
        """See :meth:`Chain.apply`. Raises :class:`Deferred` too, if it may."""
        if not chain.key:
            return value
        result = self._find(chain, value)
        if result is None:
            result = self._run(chain, value)
            self._remember(chain, value, result)
        if isinstance(result, Failure):
            raise TransformFailed(f"{where}: {result.reason}")
        return result

    @property
    def has_time(self) -> bool:
        """Whether a chain may still run in this turn of the loop."""
        return self._slice_left_s > 0 or self._left_s <= 0

    def next_slice(self) -> None:
        """A new turn of the loop."""
        self._slice_left_s = SLICE_S

    def may_ask(self, need: Need) -> bool:
        """Whether it is worth asking again."""
        return self.has_time and (not need.is_heavy or self._find(need.chain, need.value) is not None)

    def work(self, need: Need) -> Work | None:
        """What is heavy; :meth:`worked` must follow. None if the loop only has to turn."""
        return Work(need.chain, need.value, self._max_bytes, self._left_s) if need.is_heavy else None

    def worked(self, work: Work, result: str | Failure, spent_s: float) -> None:
        """The work is done. Its result is known until the next one's, and longer if there is room."""
        self._left_s -= spent_s
        self._done = (work.chain.key, work.value), result
        self._remember(work.chain, work.value, result)

    def _find(self, chain: Chain, value: str) -> str | Failure | None:
        key = (chain.key, value)
        if self._done is not None and self._done[0] == key:
            return self._done[1]
        return self._known.get(key)

    def _run(self, chain: Chain, value: str) -> str | Failure:
        if self._may_defer and not self.has_time:
            raise Deferred(Need(chain, value, is_heavy=False))
        # Without any time left a chain fails at once, here as well as elsewhere.
        budget = Budget(self._max_bytes, self._left_s, is_light=self._may_defer and self._left_s > 0)
        try:
            result = chain.run(value, budget)
        except TooHeavy:
            raise Deferred(Need(chain, value, is_heavy=True)) from None
        finally:
            self._slice_left_s -= budget.spent_s
        self._left_s -= budget.spent_s
        return result

    def _remember(self, chain: Chain, value: str, result: str | Failure) -> None:
        if isinstance(result, str):
            self._memo_left -= size_of(value) + size_of(result)
        if self._memo_left >= 0:
            self._known[chain.key, value] = result


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
    key = ",".join(transform.model_dump_json() for transform in transforms)
    return Chain(f"[{key}]", tuple(operators))


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
