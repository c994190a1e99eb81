"""The chains that docs/transforms.md gives for the output parsers of LangChain, beside those parsers."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_classic import output_parsers as classic
from langchain_core import output_parsers as core
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import openai_functions
from langchain_core.outputs import ChatGeneration
from pydantic import BaseModel

from parrot.errors import TransformFailed, TypedOutputFailed
from parrot.frontend.typed import from_schema
from parrot.frontend.variable import SemanticVariable
from parrot.manager.transforms import compile_chain

DOCS = Path(__file__).parents[1] / "docs" / "transforms.md"
Colour = Enum("Colour", {"RED": "red", "GREEN": "green", "BLUE": "blue"})


class Person(BaseModel):
    name: str
    age: int


def table() -> dict[str, str]:
    """What the documentation gives for each parser: a chain of methods, or 'unsupported'."""
    rows: dict[str, str] = {}
    for line in DOCS.read_text().split("## LangChain's output parsers")[1].splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)][1:-1]
        if cells and cells[0].startswith("`"):
            rows |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells[1].strip("`"))
    return rows


ROWS = table()


def build(node: ast.expr, variable: SemanticVariable) -> SemanticVariable:
    """The derived variable that an expression such as ``v.strip().item(0)`` describes."""
    if isinstance(node, ast.Name):
        assert node.id == "v"
        return variable
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Attribute)
    method = getattr(build(node.func.value, variable), node.func.attr)
    named = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in node.keywords}
    result = method(*map(ast.literal_eval, node.args), **named)
    assert isinstance(result, SemanticVariable)
    return result


def here(parser: str, text: str) -> Any:
    """What the documented chain makes of ``text``: text, or an object of it by key."""
    node = ast.parse(ROWS[parser], mode="eval").body
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return {key: apply(value, text) for key, value in zip(keys, node.values, strict=True)}
    return apply(node, text)


def apply(node: ast.expr, text: str) -> str:
    transforms = build(node, SemanticVariable()).to_body().transforms
    return compile_chain(transforms, where="v").apply(text, where="v", max_bytes=2**20)


def written(value: Any) -> str:
    """A value as this service writes it: text as it is, anything else as compact JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def whole(parser: Any) -> Callable[[str], Any]:
    return lambda text: written(parser.parse(text))


def by_key(parser: Any) -> Callable[[str], Any]:
    return lambda text: {key: written(value) for key, value in parser.parse(text).items()}


def xml_children(text: str) -> dict[str, str]:
    (children,) = core.XMLOutputParser(parser="xml").parse(text).values()
    return {key: value for child in children for key, value in child.items()}


def message_of(text: str) -> list[ChatGeneration]:
    return [ChatGeneration(message=AIMessage(content="", additional_kwargs=json.loads(text)))]


def tool(text: str) -> str:
    (call,) = core.JsonOutputToolsParser().parse_result(message_of(text))
    keyed = core.JsonOutputKeyToolsParser(key_name=call["type"], first_tool_only=True)
    assert keyed.parse_result(message_of(text)) == call["args"]
    return written(call["args"])


def function(text: str) -> str:
    return written(openai_functions.JsonOutputFunctionsParser().parse_result(message_of(text)))


_PEOPLE = ['{"name":"Ada","age":36}', 'Here:\n```json\n{"name":"Bo","age":1}\n```']
_SCHEMAS = [classic.ResponseSchema(name=name, description="") for name in ("name", "age")]
_BOOLEAN = classic.BooleanOutputParser()
_REGEX = classic.RegexParser(regex=r"Score: (\d+)\nWhy: (.*)", output_keys=["score", "why"])
_COLOURS = classic.RegexParser(regex="(.*)", output_keys=["colours"])
_SCORE = classic.RegexParser(regex=r"Score: (\d+)", output_keys=["score"])
_TIMES = ["2023-07-04T14:30:00.000000Z", " 1999-12-31T23:59:59.5Z\n"]

# Parser -> (what it gives, in the form of `here`; texts that both take; texts that both refuse)
CASES: dict[str, tuple[Callable[[str], Any], list[str], list[str]]] = {
    "StrOutputParser": (whole(core.StrOutputParser()), ["", "  a\n", "é {x}"], []),
    "JsonOutputParser": (
        whole(core.JsonOutputParser()),
        ['{"a": [1, 2.5, null, "é"]}', " [1]\n", "Sure:\n```\n[true]\n```", '{"a": "x\ny"}'],
        ["none", "{x}", ""],
    ),
    "CommaSeparatedListOutputParser": (
        whole(core.CommaSeparatedListOutputParser()),
        ["a, b,c", "a", '"x, y", z', "a,,b", "a\nb, c", ' a , "q ""r"""', "é,ü", "", '"x\ny", z'],
        [],
    ),
    "NumberedListOutputParser": (
        whole(core.NumberedListOutputParser()),
        ["1. a\n2. b c\n\n10. d", "Here:\n  1. x\nend", "none", "see 2. above\n3.no"],
        [],
    ),
    "MarkdownListOutputParser": (
        whole(core.MarkdownListOutputParser()),
        ["- a\n* b\n  - c d\n", "text\n- x\nmore", "none", "-no\n- yes"],
        [],
    ),
    "XMLOutputParser": (
        xml_children,
        ["<book><title>A B</title><year>1999</year></book>"],
        ["no tags", "<book><title>A"],
    ),
    "PydanticOutputParser": (
        lambda text: written(core.PydanticOutputParser(pydantic_object=Person).parse(text).model_dump()),
        _PEOPLE,
        ["Ada"],
    ),
    "StructuredOutputParser": (
        by_key(classic.StructuredOutputParser.from_response_schemas(_SCHEMAS)),
        _PEOPLE,
        ['{"name": "Ada"}', "none", "[1]"],
    ),
    "EnumOutputParser": (
        lambda text: classic.EnumOutputParser(enum=Colour).parse(text).value,
        ["red", " green\n"],
        ["pink", "red or blue", ""],
    ),
    "BooleanOutputParser": (
        _BOOLEAN.parse,
        ["YES", "Well: no.", "Yes, yes! YES", "no\nNO"],
        ["", "yesterday", "yes or no", "No, yes"],
    ),
    "DatetimeOutputParser": (
        classic.DatetimeOutputParser().parse,
        _TIMES,
        ["2023-13-04T14:30:00.0Z", "today", "2023-07-04", "2023-07-04T24:30:00.0Z"],
    ),
    "RegexParser": (by_key(_REGEX), ["Score: 7\nWhy: it is good", "x Score: 10\nWhy: \nmore"], ["Score: x"]),
    "RegexDictParser": (
        by_key(classic.RegexDictParser(output_key_to_format={"action": "Action"})),
        ["Action: search.\nInput: x", "Thought: hm\nAction:look it up"],
        ["Thought: hm", "Action: a\nAction: b"],
    ),
    "JsonOutputKeyToolsParser": (
        tool,
        ['{"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{\\"city\\": \\"Oslo\\"}"}}]}'],
        ['{"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "none"}}]}'],
    ),
    "JsonOutputFunctionsParser": (
        function,
        ['{"function_call": {"name": "f", "arguments": "{\\"city\\": \\"Oslo\\"}"}}'],
        ["{}", '{"function_call": {"name": "f", "arguments": "none"}}'],
    ),
    "CombiningOutputParser": (
        by_key(classic.CombiningOutputParser(parsers=[_COLOURS, _SCORE])),
        ["red\n\nScore: 7\n", "red\n\n  Score: 8\n\nmore"],
        ["red\n\nnone"],
    ),
}
# The same chain for several parsers, or one whose results need a program to compare.
AS_VALUES = {
    "BooleanOutputParser": lambda text: text.upper() == "YES",
    "DatetimeOutputParser": lambda text: datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ"),
    "CombiningOutputParser": lambda found: found | {"colours": ", ".join(json.loads(found["colours"]))},
}


def cases(index: int) -> list[tuple[str, str]]:
    return [(parser, text) for parser, case in CASES.items() for text in case[index]]


@pytest.mark.parametrize(("parser", "text"), cases(1))
def test_the_chain_gives_what_the_parser_gives(parser: str, text: str) -> None:
    value = here(parser, text)
    assert AS_VALUES.get(parser, lambda same: same)(value) == CASES[parser][0](text)


@pytest.mark.parametrize(("parser", "text"), cases(2))
def test_the_chain_refuses_what_the_parser_refuses(parser: str, text: str) -> None:
    with pytest.raises((ValueError, OutputParserException)):
        CASES[parser][0](text)
    with pytest.raises(TransformFailed):
        here(parser, text)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(
        ["CommaSeparatedListOutputParser", "NumberedListOutputParser", "MarkdownListOutputParser"]
    ),
    st.text(alphabet="ab1.-* \n,é", max_size=30),
)
def test_lists_agree_on_any_text(parser: str, text: str) -> None:
    assert here(parser, text) == CASES[parser][0](text)


def test_differences_are_as_documented() -> None:
    cut = '{"a": [1, 2'
    assert core.JsonOutputParser().parse(cut) == {"a": [1, 2]}
    with pytest.raises(TransformFailed):
        here("JsonOutputParser", cut)
    assert here("JsonOutputParser", 'It is {"a": 1}.') == '{"a":1}'
    impossible = "2023-02-30T00:00:00.0Z"
    with pytest.raises(OutputParserException):
        classic.DatetimeOutputParser().parse(impossible)
    assert here("DatetimeOutputParser", impossible) == impossible


@pytest.mark.parametrize("text", ['{"name":"Ada","age":36}', '{"name":"Ada"}', '{"name":1,"age":"x"}', "[]"])
def test_a_typed_output_takes_and_refuses_what_the_pydantic_parser_does(text: str) -> None:
    try:
        expected = core.PydanticOutputParser(pydantic_object=Person).parse(text)
    except OutputParserException:
        with pytest.raises(TypedOutputFailed):
            from_schema(Person).parse(text)
    else:
        assert from_schema(Person).parse(text) == expected


def test_every_parser_of_langchain_has_a_row_and_every_chain_a_comparison() -> None:
    bases = {"ListOutputParser", "ResponseSchema"} | {
        name for name in core.__all__ if name.startswith("Base")
    }
    functions = {name for name in vars(openai_functions) if name.endswith("FunctionsParser")} - {
        "OutputFunctionsParser"
    }
    assert set(ROWS) == ({*core.__all__, *classic.__all__} | functions) - bases
    compared = {ROWS[parser] for parser in CASES}
    assert set(ROWS.values()) - compared == {"unsupported"}
