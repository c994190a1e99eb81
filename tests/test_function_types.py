"""Outputs with a type: what an annotation or schema asks of the service, and the values that come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import parrot as P
from frontend_stub import StubService, flush, placeholders, stub_connection, wait_until
from parrot.errors import InvalidRequest, TemplateError, TypedOutputFailed
from parrot.frontend import background


@pytest.fixture
def service() -> Iterator[StubService]:
    with stub_connection() as stub:
        yield stub


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
    variable: P.SemanticVariable = function("x")
    flush(variable)
    wait_until(lambda: any(call.function == function.__name__ for call in service.calls))
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
