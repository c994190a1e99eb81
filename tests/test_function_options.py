"""Options of a call and of its outputs: how they travel, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import parrot as P
from frontend_stub import StubService, placeholders, stub_connection, two_outputs
from parrot.api import SamplingBody
from parrot.errors import InvalidRequest, UnknownPlaceholder


@pytest.fixture
def service() -> Iterator[StubService]:
    with stub_connection() as stub:
        yield stub


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


@pytest.mark.parametrize("option", ["seed", "max_tokens", "min_tokens", "top_k", "temperature"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_python_does_not_write_out_is_named_by_its_option(option: str, sign: int) -> None:
    with pytest.raises(InvalidRequest, match=f"P.Output: {option} = a number of too many digits") as error:
        P.Output(**{option: sign * 10**5000})
    assert error.value.param == option


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
