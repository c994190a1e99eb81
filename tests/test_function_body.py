"""What the template of a function may be: docstring, text, messages, a file; what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import parrot as P
from frontend_stub import StubService, stub_connection
from parrot.errors import TemplateError, UnknownPlaceholder


@pytest.fixture
def service() -> Iterator[StubService]:
    with stub_connection() as stub:
        yield stub


def test_a_body_may_return_its_template(service: StubService) -> None:
    style = "terse"

    @P.function
    def answer(question):
        """Answers."""
        return f"Be {style}. {question} " + "{{output}}"

    assert answer("Why?").get() == "answer.output"
    assert service.calls[0].prompt == "Be terse. {{input:question}} {{output}}"


def test_a_body_may_return_messages(service: StubService) -> None:
    @P.function
    def chat(q, persona):
        return [P.system(persona), P.user("Q: {{input:q}}"), P.assistant("{{output:a}}")]

    assert chat("hi", "You are a pirate.").get() == "chat.a"
    messages = service.calls[0].messages or ()
    assert [(m.role, m.content) for m in messages] == [
        ("system", "{{input:persona}}"),
        ("user", "Q: {{input:q}}"),
        ("assistant", "{{output:a}}"),
    ]
    assert service.calls[0].prompt is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda q: "yes {{output}}" if q else "no {{output}}", "has no value there and cannot be tested"),
        (lambda q: q.upper() + "{{output}}", "cannot be asked for .upper"),
        (lambda q: f"{q:>10}{{{{output}}}}", "cannot be formatted with '>10'"),
        (lambda: ["{{output}}"], "item 0 of the returned list is str"),
        (lambda: 7, "but int"),
        (lambda: None, "has no docstring, and its body returned nothing; forgotten `return`"),
        (lambda q: f"{q} {{output:y}}", "{output:y} has single braces"),
        (
            lambda: [P.system("s"), P.user("\n{{input:b}}"), P.assistant("{{output}}")],
            r"\), message 2 \(user\), line 2: {{input:b}} is not a parameter",
        ),
        (
            lambda: [P.user("{{input:q}}"), P.assistant("{{output:q}}")],
            "message 2 .* read before it is produced",
        ),
        (
            lambda: [P.user("{{output:a}}")],
            "message 1 .user., line 1: output 'a' belongs in an assistant message",
        ),
        (lambda: [P.assistant("{{output:a}}"), P.assistant("{{output:a}}")], "'a' is produced twice"),
    ],
)
def test_a_wrong_body_is_a_template_error(body: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        P.function(body)("x")


@pytest.mark.parametrize(
    ("docstring", "reason"),
    [
        ("Answers.", "its docstring has no holes, and its body returned nothing"),
        (
            "{input:q} {output:y}",
            "{input:q} has single braces .*, {{input:q}}; in an f-string {{{{input:q}}}}",
        ),
        ("{{inptu:q}}", "'{{inptu:q}}' is not a hole"),
    ],
)
def test_a_body_without_template_says_what_its_docstring_lacks(docstring: str, reason: str) -> None:
    def f(q: str) -> None: ...

    f.__doc__ = docstring
    with pytest.raises(TemplateError, match=reason):
        P.function(f)("x")


def test_a_missing_argument_of_a_chat_names_the_message() -> None:
    @P.function
    def chat(q):
        return [P.system("s"), P.user(q), P.assistant("{{output:a}}")]

    with pytest.raises(UnknownPlaceholder, match=r"\), message 2 \(user\), line 1: no argument 'q'"):
        chat()


def test_a_template_in_a_file_names_the_file_in_errors(service: StubService, tmp_path: Path) -> None:
    file = tmp_path / "review.txt"
    file.write_text("Review {{input:text}}\nfor {{input:reader}}: {{output}}")
    review = P.template(file)
    assert review("a", reader="b").get() == "review.output"
    with pytest.raises(UnknownPlaceholder, match=r"review.txt\), line 2: no argument 'reader'"):
        review("a")
    assert P.template("{{input:x}}{{output}}", name="named")("1").get() == "named.output"


def test_a_hole_that_is_no_parameter_names_function_and_line() -> None:
    with pytest.raises(
        UnknownPlaceholder,
        match=r"function 'f' \(.*test_function_body.py:\d+\), line 2: .*input:tsak.*did you mean 'task'",
    ) as e:

        @P.function
        def f(task):
            """Do
            {{input:tsak}}: {{output}}"""

    assert e.value.param == "tsak"


def test_a_parameter_without_hole_is_refused() -> None:
    with pytest.raises(UnknownPlaceholder, match="parameter 'extra' appears in no hole"):

        @P.function
        def f(task, extra):
            """{{input:task}}: {{output}}"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n{{outptu:x}}{{output}}", "line 2: '{{outptu:x}}' is not a hole"),
        ("{{output:a}}\n{{output:a}}", "line 2: output 'a' appears a second time"),
        ("{{input:a}}\n\n{{output:a}}", "line 3: output 'a' is read on line 1"),
        ("{{input:a b}}{{output}}", "line 1: .* needs a name"),
        ("{{input:a}}", "has no {{output:name}}$"),
        (
            "{{input:a}} {output:y}",
            "{output:y} has single .*, {{output:y}}; in an f-string {{{{output:y}}}}$",
        ),
    ],
)
def test_a_bad_template_names_the_line(text: str, message: str) -> None:
    with pytest.raises(TemplateError, match=f"function 'bad'.*{message}"):
        P.template(text, name="bad")


def test_variable_parameters_are_refused() -> None:
    with pytest.raises(TemplateError, match=r"\*items is not possible"):

        @P.function
        def f(*items):
            """{{input:items}}{{output}}"""
