"""Checking a submit pauses often, however much of it one call, variable or label has."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from graph_builder import SESSION_ID, make_graph
from parrot import api
from parrot.manager import operators
from parrot.manager.graph import Submitted


def adding(**body: Any) -> Generator[None, None, Submitted]:
    return make_graph().adding(
        api.SubmitBody.model_validate({"session_id": SESSION_ID, **body}), now_us=1_000
    )


def output(number: int, **fields: Any) -> dict[str, Any]:
    return {"name": f"o{number}", "kind": "output", "semantic_var_id": f"v{number}", **fields}


def patterns(number: int) -> list[dict[str, Any]]:
    return [{"op": "regex", "pattern": f"{number}x{index}"} for index in range(32)]


OUTPUTS = [output(number, transforms=patterns(number)) for number in range(10)]
CALL = {"prompt": "".join(f"{{{{output:o{number}}}}}" for number in range(10)), "placeholders": OUTPUTS}
INPUTS = [{**one, "name": f"i{one['name']}", "kind": "input", "semantic_var_id": "a"} for one in OUTPUTS]
READER = {
    "prompt": "".join(f"{{{{input:{one['name']}}}}}" for one in INPUTS) + "{{output:o1}}",
    "placeholders": [*INPUTS, output(1)],
}
GIVEN = {"semantic_var_id": "a", "value": ""}
SOURCES = [{"semantic_var_id": "a", "transforms": patterns(number)} for number in range(10)]


@pytest.mark.parametrize(
    "body",
    [
        {"calls": [CALL]},
        {"variables": [GIVEN], "calls": [READER]},
        {"variables": [GIVEN, {"semantic_var_id": "b", "sources": SOURCES}]},
    ],
    ids=["outputs of one call", "inputs of one call", "sources of one variable"],
)
def test_no_more_than_one_pattern_is_compiled_between_two_pauses(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_regex = operators._compile_regex

    def counted(pattern: str) -> Any:
        compiled.append(pattern)
        return compile_regex(pattern)

    monkeypatch.setattr(operators, "_compile_regex", counted)
    before, most = 0, 0
    for _ in adding(**body):
        most = max(most, len(compiled) - before)
        before = len(compiled)
    assert (len(compiled), most) == (320, 1)


def test_labels_are_merged_between_pauses_and_arrive_as_one_for_each_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = make_graph()
    labels = [
        {"semantic_var_id": "v1", "criteria": "TTFT", "target_ms": 1000 - number} for number in range(500)
    ]
    body = api.SubmitBody.model_validate(
        {
            "session_id": SESSION_ID,
            "calls": [{"prompt": "{{output:o1}}", "placeholders": [output(1)]}],
            "labels": [*labels, {"semantic_var_id": "v1", "criteria": "TPOT", "target_ms": 50}],
        }
    )
    asked: list[object] = []
    ask = type(graph).ask

    def counted(self: Any, variable: Any, demand: Any) -> bool:
        asked.append(demand)
        return ask(self, variable, demand)

    monkeypatch.setattr(type(graph), "ask", counted)
    assert sum(1 for _ in graph.adding(body, now_us=0)) > 500
    demand = graph.variable("v1").demand
    assert demand is not None
    assert (demand.criteria, demand.first_token_by_us, demand.per_token_us) == ("TTFT", 501_000, 50_000)
    assert asked == [demand]
