"""Transforms: a closed list of operators that a value passes from producer to consumer (paper section 4.2).

A chain is compiled at submit, where a malformed operator is a :class:`TransformError`, and applied when the
value exists, where a value that does not fit is a :class:`TransformFailed`. No client code runs here, and no
operator can hang or fill the memory: regular expressions are RE2's, which are matched in linear time and have
no look-around or back-references; the work of a match and the size of every result are bounded.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import re2

from ..api import Item, Join, JsonPath, Regex, Split, Strip, Template, Transform
from ..errors import TransformError, TransformFailed
from .json_path import Json, PathBudgetExceeded, PathError, compile_path, first_match

MAX_REGEX_WORK = 1 << 26  # instructions of the compiled pattern x characters: under a second at worst
MAX_JSON_CHARS = 1 << 20
MAX_JSON_STARTS = 16  # places in free text at which a JSON value is looked for
MAX_ITEMS = 100_000
_EXCERPT_CHARS = 80

_PLACEHOLDER = "{{value}}"
_FENCE = re.compile(r"```(?:json)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_JSON_START = re.compile(r"[{\[]")


class _Mismatch(Exception):
    """The value does not fit the operator; the chain adds where."""


# Takes a value and the greatest size that the result may have, in bytes (characters are a lower bound).
_Apply = Callable[[Json, int], Json]


@dataclass(frozen=True, slots=True)
class Chain:
    """Compiled transforms. Equal chains have equal ``key``; the empty key is the chain that does nothing."""

    key: str
    _operators: tuple[tuple[str, _Apply], ...]

    def apply(self, value: str, *, where: str, max_bytes: int) -> str:
        """Pass a value through all operators. Between them it may be a list, an object or a number; at the
        end text stays as it is and anything else becomes compact JSON.

        Raises :class:`TransformFailed` naming ``where``, the operator, its place in the chain, counted
        from 1, and an excerpt.
        """
        if not self._operators:
            return value
        current: Json = value
        steps = [*self._operators, ("result", _final_text)]
        for number, (op, operator) in enumerate(steps, start=1):
            try:
                current = operator(current, max_bytes)
            except _Mismatch as error:
                raise TransformFailed(
                    f"{where}: transform {number} ({op}): {error}; the value was {_excerpt(current)}"
                ) from None
        return _text(current)


def compile_chain(transforms: Sequence[Transform], *, where: str) -> Chain:
    """Raises :class:`TransformError` naming ``where``, the operator and its place in the chain."""
    operators = []
    for number, transform in enumerate(transforms, start=1):
        try:
            operators.append((transform.op, _compile(transform)))
        except ValueError as error:
            raise TransformError(f"{where}: transform {number} ({transform.op}): {error}") from None
    return Chain("".join(transform.model_dump_json() for transform in transforms), tuple(operators))


def _compile(transform: Transform) -> _Apply:
    match transform:
        case Strip():
            return lambda value, _: _text(value).strip(transform.chars)
        case Regex():
            return _regex(transform)
        case JsonPath():
            return _json_path(transform)
        case Split():
            return _split(transform)
        case Item():
            return lambda value, _: _item(value, transform.index)
        case Join():
            return lambda value, max_bytes: _join(value, transform.separator, max_bytes)
        case Template():
            return _template(transform)


@functools.lru_cache(maxsize=1024)
def _compile_regex(pattern: str) -> re2._Regexp:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        text = reason.decode() if isinstance(reason, bytes) else str(reason)
        raise ValueError(f"bad pattern {pattern!r}: {text}") from None


def _regex(transform: Regex) -> _Apply:
    pattern = _compile_regex(transform.pattern)
    group = transform.group
    if group not in pattern.groupindex if isinstance(group, str) else not 0 <= group <= pattern.groups:
        raise ValueError(f"pattern {transform.pattern!r} has no group {group!r}")

    def apply(value: Json, _: int) -> Json:
        text = _text(value)
        if pattern.programsize * len(text) > MAX_REGEX_WORK:
            raise _Mismatch(f"{len(text)} characters are too many for pattern {transform.pattern!r}")
        try:
            found = pattern.search(text)
        except UnicodeEncodeError:
            raise _Mismatch("not Unicode text") from None
        if found is None:
            raise _Mismatch(f"no match for {transform.pattern!r}")
        selected: str | None = found.group(group)
        if selected is None:
            raise _Mismatch(f"group {group!r} took no part in the match")
        return selected

    return apply


def _json_path(transform: JsonPath) -> _Apply:
    try:
        path = compile_path(transform.path)
    except PathError as error:
        raise ValueError(f"bad path {transform.path!r}: {error}") from None

    def apply(value: Json, _: int) -> Json:
        document = _parse_json(value) if isinstance(value, str) else value
        try:
            found = first_match(path, document)
        except PathBudgetExceeded as error:
            raise _Mismatch(f"{transform.path!r}: {error}") from None
        if found is None:
            raise _Mismatch(f"nothing at {transform.path!r}")
        return found[0]

    return apply


def _reject_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_reject_constant)


def _parse_json(text: str) -> Json:
    """The whole text, or the first fenced block, or the first object or array in it."""
    if len(text) > MAX_JSON_CHARS:
        raise _Mismatch(f"{len(text)} characters of JSON are above the limit of {MAX_JSON_CHARS}")
    whole = _decode(text.strip(), 0)
    if whole is not None and whole[1] == len(text.strip()):
        return whole[0]
    fenced = _FENCE.search(text)
    if fenced is not None:
        block = _decode(fenced.group(1).strip(), 0)
        if block is not None:
            return block[0]
    for _, start in zip(range(MAX_JSON_STARTS), _JSON_START.finditer(text), strict=False):
        found = _decode(text, start.start())
        if found is not None:
            return found[0]
    raise _Mismatch("no JSON in it")


def _decode(text: str, start: int) -> tuple[Json, int] | None:
    try:
        value, end = _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return value, end


def _split(transform: Split) -> _Apply:
    def apply(value: Json, _: int) -> Json:
        text = _text(value)
        num_items = text.count(transform.separator) + 1
        if num_items > MAX_ITEMS:
            raise _Mismatch(f"{num_items} items are above the limit of {MAX_ITEMS}")
        items = text.split(transform.separator)
        return [item for item in items if item or transform.keep_empty]

    return apply


def _item(value: Json, index: int | str) -> Json:
    if isinstance(value, list) and isinstance(index, int):
        if not -len(value) <= index < len(value):
            raise _Mismatch(f"no item {index} in a list of {len(value)}")
        return value[index]
    if isinstance(value, dict) and isinstance(index, str):
        if index not in value:
            raise _Mismatch(f"no key {index!r}")
        return value[index]
    wanted = "a list" if isinstance(index, int) else "an object"
    raise _Mismatch(f"item {index!r} needs {wanted}, not {_kind(value)}")


def _join(value: Json, separator: str, max_bytes: int) -> Json:
    if not isinstance(value, list):
        raise _Mismatch(f"needs a list, not {_kind(value)}")
    items = [_dump(item) for item in value]
    _check_size(sum(map(len, items)) + len(separator) * len(items), max_bytes)
    return separator.join(items)


def _template(transform: Template) -> _Apply:
    parts = transform.text.split(_PLACEHOLDER)
    if len(parts) == 1:
        raise ValueError(f"the text has no {_PLACEHOLDER}")

    def apply(value: Json, max_bytes: int) -> Json:
        text = _dump(value)
        _check_size(len(transform.text) + len(text) * (len(parts) - 1), max_bytes)
        return text.join(parts)

    return apply


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise _Mismatch(f"a result of {size} bytes is above the limit of {limit}")


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise _Mismatch(f"needs text, not {_kind(value)}")
    return value


def _kind(value: Json) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case dict():
            return "an object"


def _dump(value: Json) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise _Mismatch("nested too deeply") from None


def _excerpt(value: Json) -> str:
    try:
        text = _dump(value)
    except _Mismatch:
        return _kind(value)
    return repr(text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "...")


def _final_text(value: Json, max_bytes: int) -> Json:
    text = _dump(value)
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise _Mismatch("the result is not Unicode text") from None
    _check_size(num_bytes, max_bytes)
    return text
