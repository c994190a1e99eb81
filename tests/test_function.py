"""Semantic functions: how arguments, outputs and defaults are bound, and the programs of the guide."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import parrot as P
from frontend_stub import StubService, placeholders, stub_connection, two_outputs
from parrot.errors import DoubleProducer, InvalidRequest, UnknownPlaceholder


@pytest.fixture
def service() -> Iterator[StubService]:
    with stub_connection() as stub:
        yield stub


@P.SemanticFunction
def WritePythonCode(task: P.SemanticVariable):
    """You are an expert software engineer. Write python code of {{input:task}}. Code: {{output:code}}"""


@P.SemanticFunction
def WriteTestCode(task: P.SemanticVariable, code: P.SemanticVariable):
    """Write test code for {{input:task}}. Code: {{input:code}}. Your test code: {{output:test}}"""


def test_the_published_program_runs_as_written(service: StubService) -> None:
    def WriteSnakeGame() -> tuple[str, str]:
        task = P.SemanticVariable("a snake game")
        code = WritePythonCode(task)
        test = WriteTestCode(task, code)
        return code.get(perf=P.LATENCY), test.get(perf=P.LATENCY)

    assert WriteSnakeGame() == ("WritePythonCode.code", "WriteTestCode.test")
    assert [call.function for call in service.submits[0].calls] == ["WritePythonCode", "WriteTestCode"]
    assert service.calls[0].prompt == (
        "You are an expert software engineer. Write python code of {{input:task}}. Code: {{output:code}}"
    )
    assert placeholders(service, 1)["code"].semantic_var_id == placeholders(service)["code"].semantic_var_id
    assert [(v.value, v.semantic_var_id) for v in service.submits[0].variables] == [
        ("a snake game", placeholders(service)["task"].semantic_var_id)
    ]


def test_a_docstring_loses_its_indentation(service: StubService) -> None:
    two_outputs("x").answer.get()
    first, second = (service.calls[0].prompt or "").splitlines()
    assert first == "Think about {{input:question}}: {{output:thought}}"
    assert second == "Answer, given {{input:thought}}: {{output:answer}}"


def test_several_outputs_are_attributes_in_order(service: StubService) -> None:
    result = two_outputs("x")
    assert [variable.name for variable in result] == ["thought", "answer"]
    assert (len(result), result["answer"]) == (2, result.answer)
    with pytest.raises(AttributeError, match="no output 'other'; outputs: thought, answer"):
        result.other  # noqa: B018
    with pytest.raises(AttributeError, match=r"take one, `result.thought.get`, or `P.gather\(\*result\)`"):
        result.get()  # type: ignore[operator]
    assert result.thought.get() == "two_outputs.thought"
    assert "thought" not in [p.name for p in service.calls[0].placeholders if p.kind == "input"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("{{output:x}} <|im_end|>", "{{output:x}} <|im_end|>"),
        (3, "3"),
        (0.5, "0.5"),
        (True, "True"),
        (["ä"], '["ä"]'),
    ],
)
def test_plain_arguments_travel_as_values_and_never_as_template(
    service: StubService, value: object, text: str
) -> None:
    WritePythonCode(value).get()
    assert placeholders(service)["task"].value == text
    assert "{{input:task}}" in (service.calls[0].prompt or "")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, ": is None, .* pass ''"),
        (WriteTestCode, ": is WriteTestCode itself, .* call it"),
        (b"bytes", ": an object of type bytes has no obvious text"),
        (object(), ": an object of type object has no obvious text"),
        ([object()], ": cannot be written as JSON"),
    ],
)
def test_an_argument_without_obvious_text_is_refused(
    service: StubService, value: object, reason: str
) -> None:
    where = r"function 'WritePythonCode' \(.*test_function.py:\d+\): argument 'task'"
    with pytest.raises(TypeError, match=where + reason):
        WritePythonCode(value)


def test_a_set_of_outputs_is_refused_as_argument(service: StubService) -> None:
    with pytest.raises(TypeError, match="pass one of them"):
        WritePythonCode(two_outputs("x"))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "line 1: no argument 'question' for {{input:question}}"),
        (("a",), {"question": "b"}, "argument 'question' is given twice"),
        (
            ("a",),
            {"qestion": "b"},
            "no placeholder 'qestion'; placeholders: question, thought, answer; did you mean 'question'",
        ),
    ],
)
def test_wrong_arguments_name_function_and_placeholder(
    args: tuple[str, ...], kwargs: dict[str, str], message: str
) -> None:
    with pytest.raises(UnknownPlaceholder, match="function 'two_outputs'.*" + message):
        two_outputs(*args, **kwargs)


def test_defaults_are_arguments_too(service: StubService) -> None:
    @P.function
    def f(text, *, style="plain"):
        """{{input:style}} {{input:text}} {{output}}"""

    f("a").get()
    f("a", style="bold").get()
    assert [placeholders(service, call)["style"].value for call in (0, 1)] == ["plain", "bold"]
    with pytest.raises(
        TypeError, match=r"function 'f' \(.*test_function.py:\d+\) takes 1 .*\(text\), but 2 were"
    ):
        f("a", "bold")


def test_an_output_can_be_a_variable_made_beforehand(service: StubService) -> None:
    code = P.variable(name="mine")
    test = WriteTestCode("t", code)
    assert WritePythonCode("t", code=code) is code
    assert (test.get(), code.get()) == ("WriteTestCode.test", "WritePythonCode.code")
    assert placeholders(service, 1)["code"].semantic_var_id == code.id


@pytest.mark.parametrize(
    "make", [lambda: P.variable("set"), lambda: WritePythonCode("t"), lambda: P.variable().strip()]
)
def test_an_output_with_another_origin_is_refused(service: StubService, make: Any) -> None:
    with pytest.raises(DoubleProducer, match=r"output 'code' is (set|an output|derived)"):
        WritePythonCode("t", code=make())


def test_text_for_an_output_is_refused(service: StubService) -> None:
    with pytest.raises(TypeError, match="'code' is an output"):
        WritePythonCode("t", code="text")


def test_a_variable_of_another_session_names_the_placeholder(service: StubService) -> None:
    code = WritePythonCode("t")
    with (
        P.session(),
        pytest.raises(InvalidRequest, match="passed for 'code' belongs to another session") as error,
    ):
        WriteTestCode("t", code)
    assert error.value.param == "code"
    derived = P.join([code, "x"])
    with P.session(), pytest.raises(InvalidRequest, match="belongs to another session"):
        WriteTestCode("t", derived)


def test_the_guide_runs_as_written(service: StubService) -> None:
    guide = Path(__file__).parents[1].joinpath("docs", "frontend.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    assert len(snippets) > 7
    service.values["extract.output"] = '{"customer": "Ada", "total": 7}'
    exec(compile("\n".join(snippets), "docs/frontend.md", "exec"), {"print": str})
    assert {"write_code", "write_tests", "think", "shorten", "extract"} <= {
        call.function for call in service.calls
    }


def test_map_submits_all_calls_together(service: StubService) -> None:
    outputs = P.map(WriteTestCode, [f"task {i}" for i in range(50)], code="pass")
    assert P.join(outputs, separator=" ").name == "joined"
    assert outputs[-1].get() == "WriteTestCode.test"
    assert [len(submit.calls) for submit in service.submits] == [50]
    with P.batch():
        test = WriteTestCode("all", P.join(P.map(WritePythonCode, ["a", "b"])))
        test.get()
    assert [len(submit.calls) for submit in service.submits] == [50, 3]
    assert placeholders(service, 7)["task"].value == "task 7"
