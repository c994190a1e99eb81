"""Semantic functions: templates, bodies, binding, and the errors that name function, placeholder and line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import parrot as P
from frontend_stub import StubService, stub_connection
from parrot.api import PlaceholderBody, SamplingBody
from parrot.errors import (
    DoubleProducer,
    InvalidRequest,
    TemplateError,
    TypedOutputFailed,
    UnknownPlaceholder,
)
from parrot.frontend import background


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


@P.function
def two_outputs(question):
    """
    Think about {{input:question}}: {{output:thought}}
    Answer, given {{input:thought}}: {{output:answer}}
    """


def placeholders(service: StubService, call: int = 0) -> dict[str, PlaceholderBody]:
    return {placeholder.name: placeholder for placeholder in service.calls[call].placeholders}


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
        match=r"function 'f' \(.*test_function.py:\d+\), line 2: .*input:tsak.*did you mean 'task'",
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


def test_options_travel_with_the_call(service: StubService) -> None:
    @P.function(
        model="big",
        objective=P.THROUGHPUT,
        outputs={"b": P.Output(max_tokens=7, temperature=0.5, stop="\n", seed=1)},
    )
    def f(x):
        """{{input:x}} {{output:a}} {{output:b}}"""

    f("1").a.get()
    f.with_options(objective=P.LATENCY, outputs=P.Output(max_tokens=3, ignore_eos=True))("1").a.get()
    first, second = service.calls
    assert (first.model, first.objective, second.model, second.objective) == (
        "big",
        "THROUGHPUT",
        "big",
        "LATENCY",
    )
    assert placeholders(service, 0)["a"].sampling is None
    sampling = placeholders(service, 0)["b"].sampling
    assert sampling is not None
    assert (sampling.max_tokens, sampling.temperature, sampling.stop, sampling.seed) == (7, 0.5, ("\n",), 1)
    assert [p.sampling and p.sampling.ignore_eos for p in second.placeholders] == [None, True, True]


def test_options_for_an_output_that_does_not_exist_are_refused() -> None:
    with pytest.raises(UnknownPlaceholder, match="names 'cod', but the template has no"):

        @P.function(outputs={"cod": P.Output()})
        def f(x):
            """{{input:x}} {{output:code}}"""


class Invoice(BaseModel):
    customer: str
    total: int


def finish(service: StubService, text: str) -> None:
    """Give the first output of the last call its value."""
    variable_id = service.calls[-1].placeholders[-1].semantic_var_id or ""
    background.wait(background.run(service.finish(variable_id, text)))


def typed_call(service: StubService, function: Any, text: str) -> P.SemanticVariable:
    """A call of ``function`` whose output comes as ``text``."""
    service.held.add(function.__name__)
    with P.batch():
        variable: P.SemanticVariable = function("x")
    finish(service, text)
    return variable


def test_a_return_annotation_types_the_output(service: StubService) -> None:
    @P.function
    def extract(text) -> Invoice:
        """{{input:text}} {{output}}"""

    extract_text = '{"customer": "Ada", "total": 7}'
    invoice = typed_call(service, extract, extract_text)
    sampling = placeholders(service)["output"].sampling
    assert sampling is not None
    assert sampling.json_schema == Invoice.model_json_schema()
    assert invoice.get() == Invoice(customer="Ada", total=7)
    assert invoice.get(raw=True) == extract_text
    assert P.gather(invoice) == (Invoice(customer="Ada", total=7),)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (Invoice, '{"customer": "Ada", "total": 7}', Invoice(customer="Ada", total=7)),
        ({"type": "object", "properties": {"a": {"const": None}}}, '{"a": null}', {"a": None}),
        (list[int], "[1, 2]", [1, 2]),
        (bool, "true", True),
        (Literal["yes", "no"], "yes", "yes"),
    ],
)
def test_a_schema_gives_a_value_of_its_type(
    service: StubService, schema: object, text: str, value: object
) -> None:
    function = P.template("{{input:x}} {{output:y}}", outputs={"y": P.Output(schema=schema, max_tokens=50)})
    assert typed_call(service, function, text).get() == value
    sampling = placeholders(service)["y"].sampling
    assert sampling is not None
    assert sampling.max_tokens == 50
    assert (sampling.json_schema is None) == (sampling.choices == ("yes", "no"))
    if isinstance(schema, dict):
        assert sampling.json_schema == schema


def test_text_that_the_type_refuses_is_a_typed_failure_and_can_still_be_read(service: StubService) -> None:
    function = P.template("{{input:x}} {{output:y}}", outputs=P.Output(schema=Invoice))
    invoice = typed_call(service, function, '{"customer": "Ada", "total": "much"}')
    with pytest.raises(TypedOutputFailed, match=r"type Invoice .*total: Input should be a valid integer"):
        invoice.get()
    assert "much" in invoice.get(raw=True)


def test_an_annotation_that_is_no_type_of_text_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON schema can be made of it"):

        @P.function
        def f(x) -> Iterator[Path]:
            """{{input:x}} {{output}}"""

    with pytest.raises(TypeError, match="schema="):
        P.Output(schema=object())


def test_an_annotation_types_a_single_output_without_another_constraint() -> None:
    with pytest.raises(TemplateError, match="-> Invoice types a single output, but the template has a, b"):

        @P.function
        def two(x) -> Invoice:
            """{{input:x}} {{output:a}} {{output:b}}"""

    with pytest.raises(InvalidRequest, match=r"-> Invoice and an option of P\.Output"):

        @P.function(outputs=P.Output(regex="a+"))
        def twice(x) -> Invoice:
            """{{input:x}} {{output}}"""


@pytest.mark.parametrize("annotation", [str, None, Any, P.SemanticVariable, "Unknown"])
def test_annotations_that_mean_text_change_nothing(service: StubService, annotation: object) -> None:
    def f(x):
        """{{input:x}} {{output:y}}"""

    f.__annotations__["return"] = annotation
    assert P.function(f)("x").get() == "f.y"
    assert placeholders(service)["y"].sampling is None


def test_every_option_of_an_output_reaches_the_service(service: StubService) -> None:
    options: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {7: -5.0},
        "seed": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "logprobs": 4,
    }
    others = {"json_schema", "regex", "choices", "prompt_logprobs"}
    assert set(options) | others == set(SamplingBody.model_fields)
    P.template("{{input:x}} {{output:y}}", outputs=P.Output(**options))("x").get()
    sampling = placeholders(service)["y"].sampling
    assert sampling is not None
    assert sampling.model_dump(exclude=others) == {
        **options,
        "stop": ("a", "b"),
        "stop_token_ids": (5,),
    }
    shown = repr(P.Output(temperature=0.5, regex="a+"))
    assert shown == "Output(temperature=0.5, regex='a+')"


def test_unknown_options_are_refused_with_the_nearest() -> None:
    for accept in (P.Output, P.function):
        with pytest.raises(TypeError, match="has no option 'outputz'"):
            accept(outputz=1)
    with pytest.raises(TypeError, match="did you mean 'logprobs'"):
        P.Output(logprob=1)


def test_logprobs_that_were_not_asked_for_are_an_error_that_says_how(service: StubService) -> None:
    with pytest.raises(InvalidRequest, match=r"P.Output\(logprobs=0\)") as error:
        two_outputs("x").answer.logprobs()
    assert error.value.param == "logprobs"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {-1: 2.0}),
        ("logit_bias", {5: 101.0}),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("logprobs", 21),
        ("regex", ""),
        ("choices", []),
    ],
)
def test_a_sampling_option_out_of_range_is_named(option: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"P.Output: {option}"):
        P.Output(**{option: value})


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("max_token", 3, "no option 'max_token'; options: max_tokens, .*; did you mean 'max_tokens'"),
        ("max_tokens", "60", "max_tokens='60' is not a whole number"),
        ("max_tokens", True, "max_tokens=True is not a whole number"),
        ("seed", 1.5, "seed=1.5 is not a whole number"),
        ("temperature", False, "temperature=False is not a number"),
        ("top_p", None, "top_p=None is not a number"),
        ("ignore_eos", "no", "ignore_eos='no' is not True or False"),
    ],
)
def test_a_sampling_option_of_another_type_is_refused(option: str, value: object, reason: str) -> None:
    with pytest.raises(TypeError, match=f"P.Output.*{reason}"):
        P.Output(**{option: value})


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
