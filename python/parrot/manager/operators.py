"""The operators of transforms: each compiled from its body, each total.

A value that does not fit, or work above a bound, is a :class:`Mismatch`. No operator can hang or fill the
memory: regular expressions are RE2's, which are matched in linear time and have no look-around or
back-references; the work of a match and of parsing, the time of a chain, the number of items and the size of
every result are bounded.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import time
from collections.abc import Callable, Iterator

import re2

from ..api import Default, Item, Join, JsonPath, Lines, Regex, Split, Strip, Template, ToNumber, Transform
from .json_path import Json, PathBudgetExceeded, PathError, compile_path, first_match

MAX_REGEX_WORK = 1 << 24  # instructions of the compiled pattern x characters: 0.1 s at worst
MAX_JSON_CHARS = 1 << 20
MAX_JSON_STARTS = 16  # places in free text at which a JSON value is looked for
MAX_ITEMS = 100_000
MAX_CHAIN_S = 0.1  # time of the thread, which is the loop's; looked at between operators and items
_MAX_NUMBER_CHARS = 400
_PLACEHOLDER = "{{value}}"
_FENCE = re.compile(r"```(?:json)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_JSON_START = re.compile(r"[{\[]")
_BULLET = re.compile(r"(?:[-*+•]|\d{1,9}[.)])\s+")
_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?"
)


# What an application may be on the loop; anything above is for the process of its own.
LIGHT_S = 0.002
LIGHT_CHARS = 1 << 14  # of a text that an operator gets or makes
LIGHT_REGEX_WORK = 1 << 18


class Mismatch(Exception):
    """The value does not fit the operator; the chain adds where."""


class TooHeavy(Exception):
    """The application takes longer than a light one may; it has changed nothing."""


class Budget:
    """What one application of a chain may take: ``max_bytes`` for each result (characters are a lower
    bound), and a share of the thread's time. One that ``is_light`` ends as :class:`TooHeavy` instead of
    holding its thread for more than some milliseconds."""

    def __init__(self, max_bytes: int, left_s: float, *, is_light: bool = False) -> None:
        self.max_bytes = max_bytes
        self._may_take_s = min(MAX_CHAIN_S, left_s)
        self._is_light = is_light
        self._began = time.thread_time()

    @property
    def spent_s(self) -> float:
        """Time since it began."""
        return time.thread_time() - self._began

    def check_time(self) -> None:
        """Raise :class:`Mismatch` if the chain has run for too long."""
        spent_s = self.spent_s
        if spent_s > self._may_take_s:
            raise Mismatch("the transforms took too long")
        if self._is_light and spent_s > LIGHT_S:
            raise TooHeavy

    def check_size(self, size: int) -> None:
        """Raise :class:`Mismatch` for a result that is too large."""
        if size > self.max_bytes:
            raise Mismatch(f"a result of {size} bytes is above the limit of {self.max_bytes}")
        self.weigh(num_chars=size)

    def weigh(self, *, num_chars: int = 0, regex_work: int = 0) -> None:
        """What comes is an operator on such a text, or a match of so much work."""
        if self._is_light and (num_chars > LIGHT_CHARS or regex_work > LIGHT_REGEX_WORK):
            raise TooHeavy


Apply = Callable[[Json, Budget], Json]


def compile_operator(transform: Transform) -> Apply:
    """Raises :class:`ValueError` for a malformed operator."""
    match transform:
        case Strip():
            return _each(lambda item, _: as_text(item).strip(transform.chars))
        case Regex():
            return _regex(transform)
        case JsonPath():
            return _json_path(transform)
        case Split():
            return _split(transform)
        case Item():
            return lambda value, _: _item(value, transform.index)
        case Join():
            return lambda value, budget: _join(value, transform.separator, budget)
        case Template():
            return _template(transform)
        case Lines():
            return lambda value, _: _lines(value, transform.bullets)
        case ToNumber():
            return _each(_to_number)
        case Default():
            return lambda value, _: transform.value if value is None or value == "" else value


def _each(operator: Apply) -> Apply:
    """The operator, which takes a list item by item."""

    def apply(value: Json, budget: Budget) -> Json:
        if not isinstance(value, list):
            return operator(value, budget)
        results = []
        for item in value:
            results.append(operator(item, budget))
            budget.check_time()
        return results

    return apply


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


def _regex(transform: Regex) -> Apply:
    pattern = _compile_regex(transform.pattern)
    group = transform.group
    if group not in pattern.groupindex if isinstance(group, str) else not 0 <= group <= pattern.groups:
        raise ValueError(f"pattern {transform.pattern!r} has no group {group!r}")
    find = _find_every if transform.every else _find_first

    def apply(value: Json, budget: Budget) -> Json:
        text = as_text(value)
        work = pattern.programsize * len(text)
        if work > MAX_REGEX_WORK:
            raise Mismatch(f"{len(text)} characters are too many for pattern {transform.pattern!r}")
        budget.weigh(regex_work=work)
        try:
            return find(pattern, transform, text, budget)
        except UnicodeEncodeError:
            raise Mismatch("not Unicode text") from None

    return apply if transform.every else _each(apply)


def _find_first(pattern: re2._Regexp, transform: Regex, text: str, _: Budget) -> Json:
    found = pattern.search(text)
    if found is None:
        raise Mismatch(f"no match for {transform.pattern!r}")
    selected: str | None = found.group(transform.group)
    if selected is None:
        raise Mismatch(f"group {transform.group!r} took no part in the match")
    return selected


def _find_every(pattern: re2._Regexp, transform: Regex, text: str, budget: Budget) -> Json:
    """A match may look at all of the text that is left, so that many matches are bounded by their time."""
    found: list[Json] = []
    for match in pattern.finditer(text):
        if len(found) == MAX_ITEMS:
            raise Mismatch(f"more matches than the limit of {MAX_ITEMS}")
        found.append(match.group(transform.group) or "")
        budget.check_time()
    return found


def _json_path(transform: JsonPath) -> Apply:
    try:
        path = compile_path(transform.path)
    except PathError as error:
        raise ValueError(f"bad path {transform.path!r}: {error}") from None

    def apply(value: Json, budget: Budget) -> Json:
        document = _parse_json(value) if isinstance(value, str) else value
        try:
            found = first_match(path, document, budget.check_time)
        except PathBudgetExceeded as error:
            raise Mismatch(f"{transform.path!r}: {error}") from None
        if found is None:
            raise Mismatch(f"nothing at {transform.path!r}")
        return found[0]

    return apply


def _reject_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


# Line ends inside strings, which JSON forbids, are what models write most often.
_decoder = json.JSONDecoder(parse_constant=_reject_constant, strict=False)


def _parse_json(text: str) -> Json:
    """The whole text, or the first fenced block, or the first object or array in it."""
    if len(text) > MAX_JSON_CHARS:
        raise Mismatch(f"{len(text)} characters of JSON are above the limit of {MAX_JSON_CHARS}")
    whole = _decode(text.strip(), 0)
    if whole is not None and whole[1] == len(text.strip()):
        return whole[0]
    fenced = _FENCE.search(text)
    if fenced is not None:
        block = _decode(fenced.group(1).strip(), 0)
        if block is not None:
            return block[0]
    for start in _json_starts(text):
        found = _decode(text, start)
        if found is not None:
            return found[0]
    raise Mismatch("no JSON in it")


def _json_starts(text: str) -> Iterator[int]:
    """Where JSON may begin, while what is left to parse from there is within twice the limit in all."""
    num_chars = 0
    for _, start in zip(range(MAX_JSON_STARTS), _JSON_START.finditer(text), strict=False):
        num_chars += len(text) - start.start()
        if num_chars > 2 * MAX_JSON_CHARS:
            return
        yield start.start()


def _decode(text: str, start: int) -> tuple[Json, int] | None:
    try:
        value, end = _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return value, end


def _split(transform: Split) -> Apply:
    def apply(value: Json, _: Budget) -> Json:
        text = as_text(value)
        num_items = text.count(transform.separator) + 1
        if transform.quoted:
            num_items += text.count("\n")
        check_items(num_items)
        items = _csv_items(text, transform.separator) if transform.quoted else text.split(transform.separator)
        return [item for item in items if item or transform.keep_empty]

    return apply


def _csv_items(text: str, separator: str) -> list[str]:
    rows = csv.reader(text.splitlines(keepends=True), delimiter=separator, skipinitialspace=True)
    try:
        return [item for row in rows for item in row]
    except csv.Error as error:
        raise Mismatch(f"not CSV: {error}") from None


def _lines(value: Json, bullets: bool) -> Json:
    text = as_text(value)
    check_items(text.count("\n") + 1)
    lines = [line.strip() for line in text.split("\n")]
    if bullets:
        lines = [line[found.end() :] if (found := _BULLET.match(line)) else line for line in lines]
    return [line for line in lines if line]


def _item(value: Json, index: int | str) -> Json:
    if isinstance(value, list) and isinstance(index, int):
        if not -len(value) <= index < len(value):
            raise Mismatch(f"no item {index} in a list of {len(value)}")
        return value[index]
    if isinstance(value, dict) and isinstance(index, str):
        if index not in value:
            raise Mismatch(f"no key {index!r}")
        return value[index]
    wanted = "a list" if isinstance(index, int) else "an object"
    raise Mismatch(f"item {index!r} needs {wanted}, not {kind_of(value)}")


def _join(value: Json, separator: str, budget: Budget) -> Json:
    if not isinstance(value, list):
        raise Mismatch(f"needs a list, not {kind_of(value)}")
    items = [dump(item) for item in value]
    budget.check_size(sum(map(len, items)) + len(separator) * len(items))
    return separator.join(items)


def _template(transform: Template) -> Apply:
    parts = transform.text.split(_PLACEHOLDER)
    if len(parts) == 1:
        raise ValueError(f"the text has no {_PLACEHOLDER}")

    def apply(value: Json, budget: Budget) -> Json:
        text = dump(value)
        budget.check_size(len(transform.text) + len(text) * (len(parts) - 1))
        return text.join(parts)

    return apply


def _to_number(value: Json, _: Budget) -> Json:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    digits = as_text(value).strip()
    if len(digits) > _MAX_NUMBER_CHARS or _NUMBER.fullmatch(digits) is None:
        raise Mismatch("not a decimal number")
    plain = digits.replace(",", "")
    return int(plain) if plain.lstrip("+-").isdecimal() else float(plain)


def check_items(num_items: int) -> None:
    """Raise :class:`Mismatch` for a list that is too long."""
    if num_items > MAX_ITEMS:
        raise Mismatch(f"{num_items} items are above the limit of {MAX_ITEMS}")


def as_text(value: Json) -> str:
    """The value, which must be text."""
    if not isinstance(value, str):
        raise Mismatch(f"needs text, not {kind_of(value)}")
    return value


def kind_of(value: Json) -> str:
    """What a value is, in words."""
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


def dump(value: Json) -> str:
    """Text as it is, anything else as compact JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise Mismatch("nested too deeply") from None
    except ValueError:
        raise Mismatch("a number that is too large") from None
