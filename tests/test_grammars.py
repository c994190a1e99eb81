"""Constraints in llguidance's words: limits, escapes, and refusals that name the parameter."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from parrot.errors import InvalidRequest
from parrot.grammars import MAX_SOURCE_CHARS, check_grammar, native_grammar
from parrot.wire import Grammar


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("schema", '{"type": "object"}'),
        Grammar("schema", json.dumps({"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {}}})),
        Grammar("regex", r"\d{4}-\d\d/\w+ \p{Greek}"),
        Grammar("choices", json.dumps(["a.b", "(c)", "d|e", "f/g", "h\\i", "j\nk", "[l]-^$", "#&~", " m "])),
    ],
)
def test_good_grammars_pass(grammar: Grammar) -> None:
    check_grammar(grammar)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("schema", json.dumps({"type": "integer", "minimum": 5, "maximum": 4})), "minimum"),
        (Grammar("schema", json.dumps({"type": "nonsense"})), "nonsense"),
        (Grammar("schema", json.dumps({"not": {"type": "string"}})), "not"),
        (Grammar("schema", json.dumps({"not": {}, "x-guidance": {"lenient": True}})), "not"),
        (Grammar("schema", json.dumps({"$ref": "http://example.com/schema"})), "retrieving"),
        (Grammar("schema", json.dumps({"const": "\ud800"})), "ud800"),
        (Grammar("schema", json.dumps({"type": "integer", "minimum": 10**300})), "1000"),
        (Grammar("schema", "{"), "not JSON"),
        (Grammar("schema", "[]"), "not a JSON object"),
        (Grammar("choices", "{}"), "not a JSON list"),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("regex", r"a(?=b)"), "look-around"),
        (Grammar("regex", "a" * (MAX_SOURCE_CHARS + 1)), "above the limit"),
    ],
)
def test_bad_grammars_are_refused_with_the_reason_and_the_parameter(grammar: Grammar, reason: str) -> None:
    for param in (None, "response_format"):
        with pytest.raises(InvalidRequest) as error:
            check_grammar(grammar, param=param)
        assert error.value.param == (param or grammar.kind)
        assert error.value.message.startswith(error.value.param)
        assert reason in error.value.message
        assert len(error.value.message) < 600


def test_a_schema_cannot_loosen_the_form_of_json() -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True, "item_separator": ",\n\n"}}
    native = json.loads(native_grammar(Grammar("schema", json.dumps(schema))))
    options = native["grammars"][0]["json_schema"]["x-guidance"]
    assert (options["whitespace_flexible"], options["item_separator"]) == (False, ", ")
    assert not LLMatcher.validate_grammar(json.dumps(native))
