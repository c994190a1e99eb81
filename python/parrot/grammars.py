"""Constraints on the text of an output in the words of llguidance, checked without a tokenizer."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, TypeVar

from llguidance import LLMatcher

from .errors import InvalidRequest
from .wire import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T", list[object], dict[str, object])
UNCONSTRAINABLE = (
    "the tokenizer of this model cannot do constrained decoding (its tokens are not known as bytes: neither "
    "ByteLevel nor ByteFallback)"
)
MAX_SOURCE_CHARS = 256 * 1024
_MAX_REASON_CHARS = 400
_JSON_FORM: JsonCompileOptions = {
    # What json.dumps writes: nothing is left to choose between values, so that runs of white space are
    # bounded and all that the schema decides can be filled in without decoding it.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


def native_grammar(grammar: Grammar, *, param: str | None = None) -> str:
    """The grammar as llguidance reads it. Raises :class:`InvalidRequest` naming ``param``, else its kind."""
    if len(grammar.source) > MAX_SOURCE_CHARS:
        raise refused(
            grammar, f"{len(grammar.source)} characters are above the limit of {MAX_SOURCE_CHARS}", param
        )
    match grammar.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choices":
            choices = [str(choice) for choice in _parse(grammar, list, param)]
            return LLMatcher.grammar_from_regex("|".join(_META.sub(r"\\\g<0>", text) for text in choices))
        case "schema":
            schema = _parse(grammar, dict, param)
            try:
                return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_FORM)
            except ValueError as error:  # half a surrogate pair, an integer of more than 64 bits
                raise refused(grammar, str(error), param) from None


def check_grammar(grammar: Grammar, *, param: str | None = None) -> None:
    """Raise :class:`InvalidRequest` for a grammar that is malformed, impossible or too large. May take a
    second for a large one."""
    is_error, reasons = LLMatcher.validate_grammar_with_warnings(native_grammar(grammar, param=param))
    if is_error:
        raise refused(grammar, reasons[0], param)


def unconstrainable(grammar: Grammar, *, param: str | None = None) -> InvalidRequest:
    """The error for any grammar where the model's tokenizer rules all of them out."""
    return refused(grammar, UNCONSTRAINABLE, param)


def refused(grammar: Grammar, reason: str, param: str | None = None) -> InvalidRequest:
    """The error that names the parameter and says what is wrong with its value."""
    name = param or grammar.kind
    reason = reason.partition("<state>")[0]  # llguidance's own state follows, which says nothing to a client
    if "forced bytes" in reason:  # the ids of the only text that may follow are not text
        reason = "the text that it leaves no choice about holds a control string of the model"
    if reason.startswith("NoExtension"):
        reason = "no text satisfies it"
    reason = " ".join(reason.split())[:_MAX_REASON_CHARS]
    return InvalidRequest(f"{name} cannot be enforced: {reason}; change or leave out {name}", param=name)


def _parse(grammar: Grammar, kind: type[T], param: str | None) -> T:
    try:
        value = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise refused(grammar, f"it is not JSON ({error})", param) from None
    if not isinstance(value, kind):
        raise refused(grammar, f"it is not a JSON {'object' if kind is dict else 'list'}", param)
    return value
