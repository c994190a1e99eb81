"""Cutting templates: lines, names, and time that grows with the text and no faster."""

from __future__ import annotations

import time

import pytest

from parrot.errors import TemplateError
from parrot.template import Constant, Hole, parse_template


def test_constants_and_holes_with_the_lines_they_are_on() -> None:
    text = "one\n{{input:a}} two\n\n{{ output : b\n}}{{input:a}}{{output}} end"
    assert parse_template(text) == (
        Constant("one\n"),
        Hole("input", "a", 2),
        Constant(" two\n\n"),
        Hole("output", "b", 4),
        Hole("input", "a", 5),
        Hole("output", "output", 5),
        Constant(" end"),
    )


@pytest.mark.parametrize("name", ["", " ", "a b", "9", "a" * 129, "a\x00b"])
def test_a_hole_needs_a_name(name: str) -> None:
    with pytest.raises(TemplateError, match="needs a name"):
        parse_template(f"{{{{input:{name}}}}}")


@pytest.mark.parametrize("text", ["{{other:" + "x" * 100_000 + "}}", "{{input:" + "x" * 100_000 + "}}"])
def test_a_message_shows_the_beginning_of_what_is_wrong(text: str) -> None:
    with pytest.raises(TemplateError) as caught:
        parse_template(text, where="F")
    assert caught.value.message.startswith("F, line 1: '{{")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "text",
    [
        "{{input:" + " " * 200_000 + "{",
        "{{input:" + " " * 200_000 + "x",
        "{{" + " " * 200_000 + "{",
        "{{a" + "\t" * 200_000 + "}",
        "{" * 200_000,
        "{{input:a}}\n" * 50_000,
    ],
    ids=["spaces", "no end", "no name", "half an end", "braces", "many holes"],
)
def test_hostile_templates_take_linear_time(text: str) -> None:
    began = time.process_time()
    parse_template(text)
    assert time.process_time() - began < 10  # a quadratic parse of any of these takes minutes
