"""Transforms: what each operator does, how it fails, and that none can hang or fill the memory."""

from __future__ import annotations

import random
import time
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from machine import slowness
from parrot import api
from parrot.errors import TransformError, TransformFailed
from parrot.frontend.variable import SemanticVariable
from parrot.manager.transforms import Chain, Transformer, compile_chain

_adapter: TypeAdapter[tuple[api.Transform, ...]] = TypeAdapter(tuple[api.Transform, ...])


def chain(*transforms: dict[str, object]) -> Chain:
    return compile_chain(_adapter.validate_python(transforms), where="F, output 'x'")


def apply(text: str, *transforms: dict[str, object], max_bytes: int = 2**23) -> str:
    return chain(*transforms).apply(text, where="call F, output 'x'", max_bytes=max_bytes)


@pytest.mark.parametrize(
    ("text", "transforms", "expected"),
    [
        ("  a b \n", [{"op": "strip"}], "a b"),
        ("**a**", [{"op": "strip", "chars": "*"}], "a"),
        ("Answer: 42.", [{"op": "regex", "pattern": r"\d+"}], "42"),
        ("Answer: 42.", [{"op": "regex", "pattern": r"Answer: (\d+)", "group": 1}], "42"),
        ("x=é1", [{"op": "regex", "pattern": r"(?P<v>é\d)", "group": "v"}], "é1"),
        ("a\nb", [{"op": "regex", "pattern": "(?s)a.b"}], "a\nb"),
        ('{"a": {"b": [1, 2]}}', [{"op": "json", "path": "$.a.b[1]"}], "2"),
        ('{"a": {"b": "é"}}', [{"op": "json", "path": "$.a"}], '{"b":"é"}'),
        ('{"a": "text"}', [{"op": "json", "path": "a"}], "text"),
        ("[1, 2]", [{"op": "json"}], "[1,2]"),
        ("true", [{"op": "json"}], "true"),
        ("null", [{"op": "json"}], "null"),
        ('Sure!\n```json\n{"a": 1}\n```\nDone {"a": 2}', [{"op": "json", "path": "$.a"}], "1"),
        ('```\n{"a": 3}\n```', [{"op": "json", "path": "$.a"}], "3"),
        (
            'Here {not json} is {"a": [1, {"b": "}"}]} and {"a": 2}',
            [{"op": "json", "path": "$.a"}],
            '[1,{"b":"}"}]',
        ),
        ("a,b,,c", [{"op": "split", "separator": ","}], '["a","b","c"]'),
        ("a,b,,c", [{"op": "split", "separator": ",", "keep_empty": True}], '["a","b","","c"]'),
        ("a,b,c", [{"op": "split", "separator": ","}, {"op": "item", "index": -1}], "c"),
        ('{"k": "v"}', [{"op": "json"}, {"op": "item", "index": "k"}], "v"),
        ("a,b", [{"op": "split", "separator": ","}, {"op": "join", "separator": " - "}], "a - b"),
        ('[1, {"a": 2}, "x"]', [{"op": "json"}, {"op": "join", "separator": ";"}], '1;{"a":2};x'),
        ("v", [{"op": "template", "text": "<{{value}}|{{value}}>"}], "<v|v>"),
        ("[1.5]", [{"op": "json", "path": "$[0]"}, {"op": "template", "text": "={{value}}"}], "=1.5"),
        ("kept  ", [], "kept  "),
        (" a ,b", [{"op": "split", "separator": ","}, {"op": "strip"}], '["a","b"]'),
        ("a1 b2", [{"op": "split", "separator": " "}, {"op": "regex", "pattern": r"\d"}], '["1","2"]'),
        ("a1 b22", [{"op": "regex", "pattern": r"[a-z](\d+)", "group": 1, "every": True}], '["1","22"]'),
        ("ab", [{"op": "regex", "pattern": r"\d", "every": True}], "[]"),
        ("é1é2", [{"op": "regex", "pattern": "(é)|(\\d)", "group": 2, "every": True}], '["","1","","2"]'),
        ('{"a": "two\nlines"}', [{"op": "json", "path": "$.a"}], "two\nlines"),
        ('x, "y, z"\nw', [{"op": "split", "separator": ",", "quoted": True}], '["x","y, z","w"]'),
        ('x,,"say ""hi"""', [{"op": "split", "separator": ",", "quoted": True}], '["x","say \\"hi\\""]'),
        (" a \r\n\n b", [{"op": "lines"}], '["a","b"]'),
        ("- a\n 2. b\n3) c\n• d\n-e", [{"op": "lines", "bullets": True}], '["a","b","c","d","-e"]'),
        (" 42 \n", [{"op": "to-number"}], "42"),
        ("-1,234.50", [{"op": "to-number"}], "-1234.5"),
        (".5", [{"op": "to-number"}], "0.5"),
        ("1e3", [{"op": "to-number"}], "1000.0"),
        ("9" * 400, [{"op": "to-number"}], "9" * 400),
        ('["7", 8]', [{"op": "json"}, {"op": "to-number"}], "[7,8]"),
        ("none", [{"op": "regex", "pattern": r"\d"}, {"op": "default", "value": "0"}], "0"),
        ("none", [{"op": "json"}, {"op": "item", "index": 0}, {"op": "default", "value": "0"}], "0"),
        ("7", [{"op": "regex", "pattern": r"\d"}, {"op": "default", "value": "0"}], "7"),
        ("null", [{"op": "json"}, {"op": "default", "value": "-"}], "-"),
        ("  ", [{"op": "strip"}, {"op": "default", "value": "-"}], "-"),
        ("x", [{"op": "json"}, {"op": "default", "value": " 3 "}, {"op": "to-number"}], "3"),
    ],
)
def test_operators(text: str, transforms: list[dict[str, object]], expected: str) -> None:
    assert apply(text, *transforms) == expected


@pytest.mark.parametrize(
    ("text", "transforms", "reason"),
    [
        ("abc", [{"op": "regex", "pattern": r"\d"}], r"transform 1 \(regex\): no match"),
        ("b", [{"op": "regex", "pattern": "(a)|b", "group": 1}], "took no part"),
        ("abc", [{"op": "strip"}, {"op": "json"}], r"transform 2 \(json\): no JSON"),
        ('{"a": 1}', [{"op": "json", "path": "$.b"}], "nothing at"),
        ("NaN", [{"op": "json"}], "no JSON"),
        ("a,b", [{"op": "split", "separator": ","}, {"op": "item", "index": 2}], "no item 2 in a list of 2"),
        ('{"a": 1}', [{"op": "json"}, {"op": "item", "index": "b"}], "no key 'b'"),
        ("text", [{"op": "item", "index": 0}], "needs a list, not text"),
        ("[1]", [{"op": "json"}, {"op": "item", "index": "a"}], "needs an object, not a list"),
        ("text", [{"op": "join"}], "needs a list, not text"),
        ("[1]", [{"op": "json"}, {"op": "strip"}], "needs text, not a number"),
        ("[[]]", [{"op": "json"}, {"op": "regex", "pattern": "."}], "needs text, not a list"),
        ('{"a": 1}', [{"op": "json"}, {"op": "lines"}], "needs text, not an object"),
        ("forty", [{"op": "to-number"}], r"transform 1 \(to-number\): not a decimal number"),
        ("1,23", [{"op": "to-number"}], "not a decimal number"),
        ("٣", [{"op": "to-number"}], "not a decimal number"),
        ("9" * 401, [{"op": "to-number"}], "not a decimal number"),
        ("1e999", [{"op": "to-number"}], "a number that is too large"),
        ("[1e999]", [{"op": "json"}], "a number that is too large"),
        ("true", [{"op": "json"}, {"op": "to-number"}], "needs text, not a boolean"),
        ("a" * 200_000, [{"op": "split", "separator": ",", "quoted": True}], "not CSV"),
        ("x", [{"op": "default", "value": "-"}, {"op": "json"}], r"transform 2 \(json\): no JSON"),
        ("a" * 100_001, [{"op": "regex", "pattern": "a", "every": True}], "more matches than|took too long"),
        ("\n" * 100_000, [{"op": "lines"}], "100001 items are above"),
        ("5", [{"op": "json"}, {"op": "split", "separator": ","}], "needs text, not a number"),
        (r'"\ud800"', [{"op": "json"}], "not Unicode text"),
        (r'"\ud800"', [{"op": "json"}, {"op": "regex", "pattern": "."}], "not Unicode text"),
        ("[" * 100_000, [{"op": "json"}], "no JSON"),
        ("," * 100_000, [{"op": "split", "separator": ",", "keep_empty": True}], "100001 items are above"),
    ],
)
def test_a_value_that_does_not_fit_names_operator_index_and_excerpt(
    text: str, transforms: list[dict[str, object]], reason: str
) -> None:
    with pytest.raises(TransformFailed, match=reason) as raised:
        apply(text, *transforms)
    assert raised.value.message.startswith("call F, output 'x': transform ")
    assert "the value was " in raised.value.message
    assert len(raised.value.message) < 500


@pytest.mark.parametrize(
    "transform",
    [
        {"op": "regex", "pattern": "(a"},
        {"op": "regex", "pattern": r"(?=a)b"},
        {"op": "regex", "pattern": r"(a)\1"},
        {"op": "regex", "pattern": "a", "group": 1},
        {"op": "regex", "pattern": "(?P<x>a)", "group": "y"},
        {"op": "regex", "pattern": "a", "group": -1},
        {"op": "regex", "pattern": "((a{0,100}){0,100}){0,100}"},
        {"op": "json", "path": "$.a["},
        {"op": "json", "path": ""},
        {"op": "json", "path": "$.a.`parent`"},
        {"op": "template", "text": "nothing"},
        {"op": "regex", "pattern": "a", "group": 1, "every": True},
    ],
)
def test_a_malformed_operator_is_refused_at_submit(transform: dict[str, object]) -> None:
    with pytest.raises(TransformError, match=rf"F, output 'x': transform 2 \({transform['op']}\)"):
        chain({"op": "strip"}, transform)


def test_equal_chains_have_equal_keys() -> None:
    assert chain({"op": "strip"}).key == chain({"op": "strip", "chars": None}).key
    assert chain({"op": "strip"}).key != chain({"op": "strip", "chars": "x"}).key
    assert chain().key == ""


def _noise(length: int) -> str:
    """Text that no cache of automaton states helps with."""
    return "".join(random.Random(0).choices("ab", k=length))


@pytest.mark.parametrize(
    ("text", "transforms"),
    [
        ("a" * 200_000 + "b", [{"op": "regex", "pattern": "(a+)+$"}]),
        ("a" * 30_000, [{"op": "regex", "pattern": "(a|aa)+b"}]),
        (_noise(2**18), [{"op": "regex", "pattern": "(.*a.{999}c|.*b.{998}c|.*a.{997}c)"}]),
        ("[" * 2**19, [{"op": "json"}]),
        ('{"a":[' * 100_000, [{"op": "json"}]),
        ("[" + "1," * 400_000 + "1]", [{"op": "json", "path": "$..*..*..*..x"}]),
        ("," * 2**22, [{"op": "split", "separator": ",", "keep_empty": True}]),
        ("v" * 2**20, [{"op": "template", "text": "{{value}}" * 7000}]),
        ("a" * 1000, [{"op": "template", "text": "{{value}}" * 100}] * 32),
        (_noise(2**18), [{"op": "regex", "pattern": "a(.*c)?", "every": True}]),
        ("[" * 16 + "1," * 2**18, [{"op": "json"}]),
        (
            "[" + "1," * 100_000 + "1]",
            [{"op": "json", "path": "$..x"}, {"op": "default", "value": "[" + "1," * 30_000 + "1]"}] * 16,
        ),
    ],
)
def test_hostile_transforms_fail_within_a_second(text: str, transforms: list[dict[str, object]]) -> None:
    compiled = chain(*transforms)
    started = time.process_time()
    with pytest.raises(TransformFailed):
        compiled.apply(text, where="call F", max_bytes=2**23)
    assert time.process_time() - started < 1.0 * slowness()  # about 0.2 s


def test_a_result_above_the_size_limit_fails() -> None:
    assert apply("é" * 5, {"op": "strip"}, max_bytes=10) == "é" * 5
    with pytest.raises(TransformFailed, match="above the limit of 9"):
        apply("é" * 5, {"op": "strip"}, max_bytes=9)


@pytest.mark.parametrize("separator", ["::", "\n", '"', " "])
def test_a_quoted_split_needs_a_separator_that_csv_can_have(separator: str) -> None:
    with pytest.raises(ValidationError, match="the separator is one character"):
        api.Split(separator=separator, quoted=True)


_VALUES = st.text(max_size=40) | st.sampled_from(
    ['{"a": [1, "2", null]}', "1. a\n2. b", "a, b", "1,2", "[[], {}]"]
)
_OPERATORS = st.sampled_from(
    [
        {"op": "strip"},
        {"op": "regex", "pattern": r"(\w)|(\d)", "group": 2},
        {"op": "regex", "pattern": r"\w+", "every": True},
        {"op": "json"},
        {"op": "json", "path": "$..a"},
        {"op": "split", "separator": ","},
        {"op": "split", "separator": ",", "quoted": True, "keep_empty": True},
        {"op": "lines", "bullets": True},
        {"op": "item", "index": 0},
        {"op": "item", "index": "a"},
        {"op": "join"},
        {"op": "template", "text": "<{{value}}>"},
        {"op": "to-number"},
        {"op": "default", "value": "-"},
    ]
)


@settings(max_examples=300, deadline=None)
@given(_VALUES, st.lists(_OPERATORS, max_size=5))
def test_any_chain_gives_text_or_a_typed_error(text: str, transforms: list[dict[str, object]]) -> None:
    compiled = chain(*transforms)
    try:
        result = compiled.apply(text, where="call F", max_bytes=1000)
    except TransformFailed:
        assert transforms[-1]["op"] != "default"
    else:
        assert len(result.encode()) <= 1000


def test_the_methods_of_variables_are_the_operators() -> None:
    operators = {
        body.model_fields["op"].default.replace("-", "_") for body in get_args(get_args(api.Transform)[0])
    }
    assert len(operators) == 10
    for name in operators:
        assert callable(getattr(SemanticVariable, name))


def test_equal_chains_of_one_value_run_once_in_an_event() -> None:
    runs = []
    counted = Chain("counted", (("strip", lambda value, _: runs.append(value) or value),))
    transformer = Transformer(100)
    assert [transformer.apply(counted, text, where="here") for text in ("a", "b", "a", "a")] == [
        "a",
        "b",
        "a",
        "a",
    ]
    assert runs == ["a", "b"]


def test_a_failure_that_is_known_names_each_place() -> None:
    transformer, digits = Transformer(100), chain({"op": "regex", "pattern": r"\d"})
    for where in ("call A, input 'x'", "call B, input 'y'"):
        with pytest.raises(TransformFailed, match=f"^{where}: transform 1"):
            transformer.apply(digits, "none", where=where)


def test_what_one_event_transforms_is_bounded_however_many_consumers_there_are() -> None:
    text = "[" + "1," * 40_000 + "1]"
    for _ in range(3):  # a machine that is halted meanwhile makes an application take all the time there is
        transformer, failures = Transformer(2**23), []
        started = time.process_time()
        for number in range(200):
            slow = chain(
                {"op": "json"}, {"op": "join", "separator": str(number)}, {"op": "split", "separator": "1"}
            )
            try:
                transformer.apply(slow, text, where="call F")
            except TransformFailed as error:
                failures.append(error.message)
        assert time.process_time() - started < 4 * slowness()
        assert len(failures) > 100
        if len(failures) < 200:
            break
    assert len(failures) < 200
    assert "the transforms took too long" in failures[-1]
    assert transformer.apply(chain(), "as it is", where="call F") == "as it is"
