"""From template and bindings to steps: order, bindings, sampling, and errors that name the place."""

from __future__ import annotations

import pytest

from graph_builder import make_graph, prompt_call, read, submit, write
from parrot import api
from parrot.errors import InvalidRequest, TemplateError, TransformError, UnknownPlaceholder
from parrot.manager.call import Call, InputPart, TextPart


def only(call: api.CallBody) -> Call:
    return submit(make_graph(), call).calls[0]


def described(call: Call) -> list[list[str]]:
    def text(part: TextPart | InputPart) -> str:
        return part.text if isinstance(part, TextPart) else f"<{part.binding.name}={part.binding.text}>"

    return [[*map(text, step.parts), f"-> {step.output.binding.name}"] for step in call.steps]


def test_a_prompt_is_cut_into_one_step_per_output() -> None:
    call = only(
        prompt_call(
            "F",
            "A {{input:a}} B {{output:x}} C {{input:a}}{{input:b}}{{output:y}} tail {{input:b}}",
            read("a", value="1"),
            read("b", value="2"),
        )
    )
    assert described(call) == [["A ", "<a=1>", " B ", "-> x"], [" C ", "<a=1>", "<b=2>", "-> y"]]
    assert [call.inputs[name].first_step for name in "ab"] == [0, 1]
    assert call.roles is None


def test_messages_keep_their_index_and_roles() -> None:
    call = only(
        api.CallBody(
            messages=(
                api.MessageBody(role="system", content="S"),
                api.MessageBody(role="user", content="Q {{input:q}}"),
                api.MessageBody(role="assistant", content="So {{output:a}}"),
                api.MessageBody(role="user", content="Why?"),
                api.MessageBody(role="assistant", content="{{output:b}}"),
            ),
            placeholders=(read("q", value="?"), write("a"), write("b")),
        )
    )
    assert call.roles == ("system", "user", "assistant", "user", "assistant")
    assert [[part.message for part in (*step.parts, step.output)] for step in call.steps] == [
        [0, 1, 1, 2, 2],
        [3, 4],
    ]


def test_text_of_a_value_never_becomes_a_hole() -> None:
    call = only(prompt_call("F", "{{input:a}}{{output:x}}", read("a", value="{{output:y}} <|im_end|>")))
    assert described(call) == [["<a={{output:y}} <|im_end|>>", "-> x"]]


def test_sampling_has_the_services_default_length() -> None:
    sampling = api.SamplingBody(temperature=0.5, top_p=0.9, seed=7, stop=("\n",), ignore_eos=True)
    graph = make_graph(default_max_tokens=99)
    call = submit(
        graph,
        prompt_call(
            "F",
            "{{output:x}}{{output:y}}{{output:z}}",
            write("x", sampling=sampling),
            write("y", sampling=api.SamplingBody(max_tokens=5)),
        ),
    ).calls[0]
    x, y, z = (call.outputs[name].sampling for name in "xyz")
    assert (x.max_tokens, x.temperature, x.top_p, x.seed, x.stop, x.ignore_eos) == (
        99,
        0.5,
        0.9,
        7,
        ("\n",),
        True,
    )
    assert (y.max_tokens, y.temperature) == (5, 0.0)
    assert z.max_tokens == 99


def test_an_input_of_an_earlier_outputs_name_reads_that_output() -> None:
    call = only(prompt_call("F", "{{output:x}} again {{input:x}} {{output:y}}"))
    assert call.inputs["x"].variable is call.outputs["x"].variable
    assert call.inputs["x"].first_step == 1


def hole_error(error: type[Exception], message: str, call: api.CallBody) -> None:
    graph = make_graph()
    with pytest.raises(error, match=message):
        submit(graph, call)
    assert not graph.calls
    assert not graph.variables


_OUT = write("x")
HOLE_ERRORS: list[tuple[type[Exception], str, api.CallBody]] = [
    (
        UnknownPlaceholder,
        "G, line 2: {{input:a}} has no binding",
        api.CallBody(function="G", prompt="\n{{input:a}}{{output:x}}", placeholders=(_OUT,)),
    ),
    (UnknownPlaceholder, "{{output:x}} has no binding", api.CallBody(function="G", prompt="{{output:x}}")),
    (
        UnknownPlaceholder,
        "G: input 'b' is bound, but the template has no {{input:b}}",
        api.CallBody(function="G", prompt="{{output:x}}", placeholders=(_OUT, read("b", value=""))),
    ),
    (
        UnknownPlaceholder,
        "output 'y' is bound, but",
        api.CallBody(function="G", prompt="{{output:x}}", placeholders=(_OUT, write("y"))),
    ),
    (
        UnknownPlaceholder,
        "line 1: {{input:a}} has no binding",
        api.CallBody(function="G", prompt="{{input:a}}{{output:x}}", placeholders=(_OUT, write("a"))),
    ),
    (
        TemplateError,
        "G, line 1: '{{inptu:a}}' is not a hole",
        api.CallBody(function="G", prompt="{{inptu:a}}{{output:x}}", placeholders=(_OUT,)),
    ),
    (TemplateError, "G: the template has no {{output:name}}$", api.CallBody(function="G", prompt="text")),
    (TemplateError, "r-7: the template has no", api.CallBody(request_id="r-7", prompt="text")),
    (
        InvalidRequest,
        "G: output 'x' is bound twice",
        api.CallBody(function="G", prompt="{{output:x}}", placeholders=(_OUT, write("x", "y"))),
    ),
    (
        InvalidRequest,
        "input 'a' needs a semantic_var_id or a value",
        api.CallBody(
            function="G",
            prompt="{{input:a}}{{output:x}}",
            placeholders=(_OUT, api.PlaceholderBody(name="a", kind="input")),
        ),
    ),
    (
        InvalidRequest,
        "output 'x' cannot have a value",
        api.CallBody(function="G", prompt="{{output:x}}", placeholders=(write("x", value="v"),)),
    ),
    (
        InvalidRequest,
        "input 'a' cannot have sampling",
        api.CallBody(
            function="G",
            prompt="{{input:a}}{{output:x}}",
            placeholders=(_OUT, read("a", value="", sampling=api.SamplingBody())),
        ),
    ),
    (
        InvalidRequest,
        "input 'x' reads the output of that name",
        api.CallBody(
            function="G",
            prompt="{{output:x}}{{input:x}}{{output:y}}",
            placeholders=(_OUT, write("y"), read("x", value="v")),
        ),
    ),
    (
        TransformError,
        r"G, output 'x': transform 1 \(regex\)",
        api.CallBody(
            function="G",
            prompt="{{output:x}}",
            placeholders=(write("x", transforms=[{"op": "regex", "pattern": "("}]),),
        ),
    ),
]


@pytest.mark.parametrize(("error", "message", "call"), HOLE_ERRORS)
def test_errors_name_function_placeholder_and_line(
    error: type[Exception], message: str, call: api.CallBody
) -> None:
    hole_error(error, message, call)


def chat(*messages: tuple[str, str]) -> api.CallBody:
    return api.CallBody.model_validate(
        {
            "function": "C",
            "messages": [{"role": role, "content": content} for role, content in messages],
            "placeholders": [write("x"), read("a", value="")],
        }
    )


def test_holes_are_checked_across_messages() -> None:
    good = ("assistant", "{{output:x}}")
    hole_error(
        TemplateError,
        r"C, message 1 \(user\), line 2: output 'x' belongs in an assistant",
        chat(("user", "\n{{output:x}}"), good),
    )
    hole_error(
        TemplateError, r"message 2 \(assistant\), line 1: output 'x' appears a second time", chat(good, good)
    )
    hole_error(
        TemplateError,
        r"message 2 \(assistant\), line 1: output 'x' is read before it is produced",
        chat(("user", "{{input:x}}"), good),
    )
    hole_error(
        UnknownPlaceholder,
        r"C, message 2 \(user\), line 2: {{input:b}} has no binding",
        chat(("user", "{{input:a}}"), ("user", "\n{{input:b}}"), good),
    )
