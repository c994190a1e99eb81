"""Parsed prompts by content: shared between calls and sessions, bounded, refusals not kept."""

from __future__ import annotations

import pytest

from graph_builder import make_graph, prompt_call, read, submit, write
from parrot import api
from parrot.config import ManagerConfig
from parrot.errors import TemplateError
from parrot.manager.call import Call
from parrot.manager.prompt_table import PromptTable
from parrot.manager.session import SessionTable


def body(prompt: str) -> api.CallBody:
    return api.CallBody(prompt=prompt)


def first_text(call: Call) -> str:
    return call.steps[0].parts[0].text  # type: ignore[union-attr,return-value]


def test_the_constants_of_a_template_exist_once_for_all_sessions() -> None:
    sessions = SessionTable(ManagerConfig())
    texts = []
    for index in range(3):
        # Built anew each time, as text that comes from a client is.
        prompt = "".join(["A constant ", "{{input:a}}", "{{output:x}}"])
        call = prompt_call("F", prompt, read("a", value=str(index)))
        graph = sessions.create().graph
        texts.append(first_text(submit(graph, call).calls[0]))
    assert texts[0] == "A constant "
    assert all(text is texts[0] for text in texts)


def test_calls_of_one_template_keep_their_own_bindings() -> None:
    prompt = "Say {{input:a}} {{output:x}}"
    bodies = [prompt_call(f"F{i}", prompt, read("a", value=str(i)), write("x", f"v{i}")) for i in range(2)]
    calls = submit(make_graph(), *bodies).calls
    assert [call.inputs["a"].text for call in calls] == ["0", "1"]
    assert [call.outputs["x"].variable.id for call in calls] == ["v0", "v1"]


def test_the_least_recently_used_prompts_are_dropped_at_the_limit() -> None:
    table = PromptTable(capacity_bytes=10_000)
    first = table.get(body("first {{output:x}}"), where="F", domain=1)
    for index in range(100):
        table.get(body(f"prompt {index} " + "x" * 500 + "{{output:x}}"), where="F", domain=1)
        assert table.get(body("first {{output:x}}"), where="F", domain=1) is first
        assert table.used_bytes <= 10_000
    kept = table.get(body("prompt 99 " + "x" * 500 + "{{output:x}}"), where="F", domain=1)
    assert table.get(body("prompt 99 " + "x" * 500 + "{{output:x}}"), where="F", domain=1) is kept


def test_a_prompt_of_another_tenant_is_parsed_anew() -> None:
    table = PromptTable()
    first = table.get(body("first {{output:x}}"), where="F", domain=1)
    assert table.get(body("first {{output:x}}"), where="F", domain=2) is not first
    assert table.get(body("first {{output:x}}"), where="F", domain=1) is first


def test_a_prompt_larger_than_the_table_is_still_parsed() -> None:
    table = PromptTable(capacity_bytes=100)
    prompt = table.get(body("x" * 5000 + "{{output:x}}"), where="F", domain=1)
    assert prompt.outputs == {"x"}
    assert table.get(body("y {{output:y}}"), where="F", domain=1).outputs == {"y"}
    assert table.used_bytes < 2000


def test_a_refusal_names_the_function_that_was_called_each_time() -> None:
    table = PromptTable()
    for where in ("first", "second"):
        with pytest.raises(TemplateError, match=f"{where}, line 1"):
            table.get(body("{{wrong:x}}"), where=where, domain=1)


def test_chats_with_other_roles_are_other_prompts() -> None:
    def chat(role: str) -> api.CallBody:
        first = {"role": role, "content": "Hello"}
        return api.CallBody.model_validate(
            {"messages": [first, {"role": "assistant", "content": "{{output:x}}"}]}
        )

    table = PromptTable()
    roles = [table.get(chat(role), where="F", domain=1).roles for role in ("user", "system")]
    assert roles == [("user", "assistant"), ("system", "assistant")]
