"""Semantic variables: values, waiting, setting, cancelling, and derived variables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest

import parrot as P
from frontend_stub import StubService, flush, stub_connection, wait_until
from parrot.errors import (
    AuthenticationError,
    Cancelled,
    DoubleProducer,
    EngineLost,
    GetTimeout,
    InvalidRequest,
    PromptTooLong,
    RateLimited,
    Unavailable,
    UnsupportedParameter,
)
from parrot.frontend import background


@pytest.fixture
def service() -> Iterator[StubService]:
    with stub_connection() as stub:
        yield stub


@P.function
def plan(goal):
    """Plan {{input:goal}}: {{output:steps}}"""


def test_only_text_is_a_value() -> None:
    for value in (3, b"x", ["x"], {"a": 1}):
        with pytest.raises(TypeError, match=f"is text, not {type(value).__name__}"):
            P.SemanticVariable(value)
    with pytest.raises(ValueError, match="is not a name"):
        P.SemanticVariable(name="two words")


def test_adding_text_to_a_variable_says_what_to_do_instead() -> None:
    for add in (lambda v: v + "x", lambda v: "x" + v, lambda v: v + v):
        with pytest.raises(TypeError, match=r"variable 'code' .* template.* or use P\.join"):
            add(P.variable(name="code"))


def test_half_of_a_surrogate_pair_is_refused_where_it_is_written(service: StubService) -> None:
    half = "a\ud800"
    declared = P.SemanticVariable(name="goal")
    plan(declared)
    uses: list[Callable[[], object]] = [
        lambda: P.SemanticVariable(half, name="goal"),
        lambda: P.join([half]),
        lambda: declared.set(half),
        lambda: plan(half),
        lambda: P.template(half + "{{output:x}}")(),
    ]
    for use in uses:
        with pytest.raises(InvalidRequest, match=r"surrogate|unicode"):
            use()
    declared.set("Köln")
    assert declared.get() == "Köln"


def test_a_value_that_is_known_needs_no_service(service: StubService) -> None:
    variable = P.variable("text")
    assert (variable.get(), variable.done()) == ("text", True)
    assert not service.submits
    assert not service.gets


def test_a_variable_cannot_slip_into_text(service: StubService) -> None:
    with pytest.raises(TypeError, match="pass it to a semantic function"):
        f"{plan('x')}"
    assert "pending" in repr(plan("x"))


def test_wrong_arguments_of_a_get_are_named_before_anything_is_sent(service: StubService) -> None:
    variable = P.SemanticVariable()
    for timeout in ("1", float("nan")):
        with pytest.raises(TypeError, match="is not a number of seconds"):
            variable.get(timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="is not a number of seconds"):
            P.gather(variable, timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"P\.gather\(\*variables\)"):
        P.gather([variable])  # type: ignore[arg-type]
    assert not service.submits
    with pytest.raises(GetTimeout, match="to be set by the caller"):
        variable.get(timeout=0)


def test_a_get_times_out_and_may_be_asked_again(service: StubService) -> None:
    service.held.add("plan")
    steps = plan("x")
    with pytest.raises(
        GetTimeout, match=r"an output of plan\) has no value after 0.05 s; it is still pending"
    ):
        steps.get(timeout=0.05)
    assert not steps.done()
    background.run(service.finish(steps.id, "late")).result(120)
    assert steps.done()
    assert steps.get(timeout=60) == "late"


def test_a_value_is_asked_for_once(service: StubService) -> None:
    steps = plan("x")
    assert [steps.get() for _ in range(3)] == ["plan.steps"] * 3
    assert len(service.gets) == 1


def test_an_error_keeps_its_type_and_is_remembered(service: StubService) -> None:
    service.held.add("plan")
    steps = plan("x")
    background.run(service.finish(steps.id, EngineLost("engine-0 died"))).result(120)
    with pytest.raises(EngineLost, match="engine-0 died"):
        steps.get()
    num_gets = len(service.gets)  # one more, if it failed beside its submit before that was answered
    with pytest.raises(EngineLost, match="engine-0 died"):
        steps.get()
    assert steps.done()
    assert len(service.gets) == num_gets <= 2


def test_a_final_error_ends_the_variable_and_a_passing_one_does_not(service: StubService) -> None:
    service.held.add("plan")
    steps = plan("x")
    passing = (Unavailable("no engine is ready"), AuthenticationError("revoked"), RateLimited("used up"))
    for error in passing:
        background.run(service.finish(steps.id, error)).result(120)
        with pytest.raises(type(error)):
            steps.done()
    background.run(service.finish(steps.id, PromptTooLong("9000 tokens"))).result(120)
    assert steps.done()
    with pytest.raises(PromptTooLong):
        steps.get()


def test_an_empty_value_is_a_value(service: StubService) -> None:
    service.held.add("plan")
    steps = plan("x")
    background.run(service.finish(steps.id, "")).result(120)
    assert steps.get() == ""
    assert steps.done()


def test_a_get_is_latency_unless_it_says_otherwise(service: StubService) -> None:
    plan("x").get()
    plan("y").get(perf=P.THROUGHPUT)
    plan("z").get(perf="THROUGHPUT")
    assert [submit.labels[0].criteria for submit in service.submits] == [
        "LATENCY",
        "THROUGHPUT",
        "THROUGHPUT",
    ]
    assert [get.criteria for get in service.gets] == ["LATENCY", "THROUGHPUT", "THROUGHPUT"]
    with pytest.raises(UnsupportedParameter, match="not supported; use P"):
        plan("x").get(perf="TTFT")


def test_a_target_travels_with_submit_and_get_less_the_time_that_has_passed(service: StubService) -> None:
    service.held.add("plan")
    steps = plan("x")
    with pytest.raises(GetTimeout):
        steps.get(perf=P.deadline(5000), timeout=0.1)
    background.run(service.finish(steps.id, "late")).result(120)
    assert P.gather(steps, perf=P.tpot(0.05)) == ("late",)
    (label,) = service.submits[0].labels
    assert label.criteria == "DEADLINE"
    assert 4_900_000 < (label.target_ms or 0) <= 5_000_000
    first, *_, last = [(get.criteria, get.target_ms or 0) for get in service.gets]
    assert first[0] == "DEADLINE"
    assert first[1] <= (label.target_ms or 0)
    assert last == ("TPOT", 50)


def test_a_get_labels_its_variable_once(service: StubService) -> None:
    variable = P.variable()
    service.held.add("plan")
    steps = plan(variable)
    with pytest.raises(GetTimeout):
        steps.get(perf=P.deadline(6000), timeout=0.05)
    with patch("parrot.frontend.session._POLL_S", 0.02), ThreadPoolExecutor(1) as threads:
        again = threads.submit(steps.get)
        wait_until(lambda: len(service.gets) > 3)
        background.run(service.finish(steps.id, "late")).result(120)
        assert again.result(120) == "late"
    assert [get.criteria for get in service.gets[1:]] == ["LATENCY", *[None] * (len(service.gets) - 2)]


def test_a_function_may_carry_a_target(service: StubService) -> None:
    plan.with_options(objective=P.ttft(0.5))("x").get()
    assert [(call.objective, call.target_ms) for call in service.calls] == [("TTFT", 500.0)]


@pytest.mark.parametrize("make", [P.ttft, P.tpot, P.deadline])
def test_a_target_is_a_positive_number_of_seconds(make: Callable[[object], object]) -> None:
    for bad in (0, -1, float("nan"), 1e6):
        with pytest.raises(ValueError, match="seconds"):
            make(bad)
    for bad in ("1", None, True):
        with pytest.raises(TypeError, match="not a number of seconds"):
            make(bad)


def test_awaited_variables_share_one_submit(service: StubService) -> None:
    async def run() -> list[str]:
        steps = [plan(str(i)) for i in range(4)]
        waiting = asyncio.ensure_future(steps[0])
        await asyncio.sleep(0)
        flush(steps[0])
        first, more = await waiting, plan("x")
        together = asyncio.gather(more.aget(P.THROUGHPUT), *(step.aget() for step in steps))
        await asyncio.sleep(0)
        flush(more)
        return [first, *await together]

    assert asyncio.run(run()) == ["plan.steps"] * 6
    assert [(len(submit.calls), len(submit.labels)) for submit in service.submits] == [(4, 1), (1, 1)]


def test_an_awaiting_task_can_be_cancelled(service: StubService) -> None:
    service.held.add("plan")

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(plan("x").aget(), 0.05)

    asyncio.run(run())


def test_gather_labels_everything_before_it_waits(service: StubService) -> None:
    code, test = plan("a"), plan("b")
    assert P.gather(code, P.variable("known"), test, perf=P.LATENCY) == ("plan.steps", "known", "plan.steps")
    (submit,) = service.submits
    assert {(label.semantic_var_id, label.criteria) for label in submit.labels} == {
        (code.id, "LATENCY"),
        (test.id, "LATENCY"),
    }


def test_gather_waits_for_all_at_once(service: StubService) -> None:
    service.held.add("plan")
    steps = [plan(str(i)) for i in range(20)]
    with ThreadPoolExecutor(1) as threads:
        gathered = threads.submit(P.gather, *steps)
        wait_until(lambda: service.num_waiting == 20)  # one after the other, it would be one
        for number, step in enumerate(steps):
            background.run(service.finish(step.id, str(number))).result(120)
        assert gathered.result(120) == tuple(map(str, range(20)))


def test_set_before_use_travels_with_the_first_call(service: StubService) -> None:
    goal = P.variable(name="goal")
    goal.set("a cake")
    plan(goal).get()
    assert service.submits[0].variables[0].value == "a cake"
    with pytest.raises(DoubleProducer, match="set by the caller"):
        goal.set("a pie")


def test_set_after_use_reaches_the_service(service: StubService) -> None:
    goal = P.variable()
    plan(goal)
    goal.set("a cake")
    assert service.submits[0].variables[0].value is None
    assert goal.get() == "a cake"
    with pytest.raises(TypeError, match="is text, not int"):
        P.variable().set(3)


def test_an_output_cannot_be_set(service: StubService) -> None:
    with pytest.raises(DoubleProducer, match="an output of plan"):
        plan("x").set("y")


def test_a_cancelled_variable_ends_as_cancelled(service: StubService) -> None:
    service.held.add("plan")
    steps = plan("x")
    steps.cancel()
    with pytest.raises(Cancelled):
        steps.get()


def test_methods_chain_into_one_derived_variable(service: StubService) -> None:
    item = plan("x").regex(r"items: (.*)", group=1).split(",").item(-1).strip().template("<{{value}}>")
    with pytest.raises(GetTimeout):
        item.get(timeout=0)
    (declared,) = service.submits[0].variables
    assert [step.op for step in declared.transforms] == ["regex", "split", "item", "strip", "template"]
    assert [source.semantic_var_id for source in declared.sources or ()] == [
        service.calls[0].placeholders[-1].semantic_var_id
    ]
    assert service.submits[0].labels[0].semantic_var_id == item.id


def test_a_derived_variable_is_declared_before_the_call_that_reads_it(service: StubService) -> None:
    summary = P.join([plan("a"), plan("b").json("$.x"), "constant"], separator="|")
    plan(summary)
    plan(summary).get()
    (submit,) = service.submits
    by_id = {variable.semantic_var_id: variable for variable in submit.variables}
    assert len(by_id) == len(submit.variables) == 3
    assert [v.semantic_var_id for v in submit.variables][-1] == summary.id
    assert by_id[summary.id].separator == "|"
    assert submit.calls[2].placeholders[0].semantic_var_id == summary.id


def test_a_malformed_transform_is_refused_where_it_is_written() -> None:
    with pytest.raises(InvalidRequest, match=r"var.split\(\): separator"):
        P.variable().split("")
    with pytest.raises(ValueError, match="at least one"):
        P.join([])
