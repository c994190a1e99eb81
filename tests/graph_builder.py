"""Short ways to write submits for tests of the manager's graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parrot import api
from parrot.config import ManagerConfig
from parrot.errors import ErrorInfo
from parrot.manager.call import Call
from parrot.manager.graph import Changes, Graph, Submitted

SESSION_ID = "s-" + "0" * 32


def make_graph(**config: int) -> Graph:
    return Graph(SESSION_ID, config=ManagerConfig(**config))


def read(name: str, var_id: str | None = None, **fields: object) -> api.PlaceholderBody:
    """An input placeholder; with no ``var_id`` it reads the variable of its own name."""
    if "value" not in fields:
        fields["semantic_var_id"] = var_id or name
    return api.PlaceholderBody.model_validate({"name": name, "kind": "input", **fields})


def write(name: str, var_id: str | None = None, **fields: object) -> api.PlaceholderBody:
    """An output placeholder; with no ``var_id`` it writes the variable of its own name."""
    return api.PlaceholderBody.model_validate(
        {"name": name, "kind": "output", "semantic_var_id": var_id or name, **fields}
    )


def prompt_call(
    function: str, prompt: str, /, *placeholders: api.PlaceholderBody, **fields: object
) -> api.CallBody:
    """A call whose holes without a binding are bound to the variables of their own names."""
    bound = {(placeholder.kind, placeholder.name) for placeholder in placeholders}
    outputs = {name for kind, name in _holes(prompt) if kind == "output"}
    rest = [
        write(name) if kind == "output" else read(name)
        for kind, name in dict.fromkeys(_holes(prompt))
        if (kind, name) not in bound and not (kind == "input" and name in outputs)
    ]
    return api.CallBody.model_validate(
        {
            "function": function,
            "request_id": function,
            "prompt": prompt,
            "placeholders": [*placeholders, *rest],
        }
        | fields
    )


def _holes(prompt: str) -> list[tuple[str, str]]:
    holes = [text.split("}}")[0] for text in prompt.split("{{")[1:]]
    return [(kind, name) for kind, _, name in (hole.partition(":") for hole in holes)]


def flow_call(function: str, inputs: Sequence[str], outputs: Sequence[str], **fields: object) -> api.CallBody:
    """A call that reads all inputs and then writes all outputs, each hole named as its variable."""
    holes = [f"{{{{input:{name}}}}}" for name in inputs] + [f"{{{{output:{name}}}}}" for name in outputs]
    return prompt_call(function, f"{function}: " + " ".join(holes), **fields)


def join(var_id: str, *sources: str, **fields: object) -> api.VariableBody:
    """A derived variable."""
    bodies = [{"semantic_var_id": source} for source in sources]
    return api.VariableBody.model_validate({"semantic_var_id": var_id, "sources": bodies, **fields})


def value(var_id: str, text: str | None = None) -> api.VariableBody:
    """A variable that is set, or merely declared."""
    return api.VariableBody(semantic_var_id=var_id, value=text)


def body(
    *calls: api.CallBody,
    variables: Sequence[api.VariableBody] = (),
    labels: Mapping[str, api.Criteria] | None = None,
) -> api.SubmitBody:
    label_bodies = [
        api.LabelBody(semantic_var_id=var_id, criteria=criteria)
        for var_id, criteria in (labels or {}).items()
    ]
    return api.SubmitBody(
        session_id=SESSION_ID, calls=calls, variables=tuple(variables), labels=tuple(label_bodies)
    )


def submit(graph: Graph, *calls: api.CallBody, **fields: object) -> Submitted:
    return graph.add(body(*calls, **fields), now_us=0)  # type: ignore[arg-type]


def names(calls: Sequence[Call]) -> list[str]:
    return sorted(call.request_id for call in calls)


def finish(graph: Graph, request_id: str, *texts: str) -> Changes:
    """Dispatch a live call and complete its next outputs; returns the last one's changes."""
    call = graph.live[request_id]
    call.dispatch("engine-0")
    changes = Changes()
    for text in texts:
        changes = graph.complete(call, call.next_step, text)
    return changes


def states(graph: Graph) -> dict[str, str]:
    return {call.request_id: call.state.value for call in graph.calls.values()}


def error_of(graph: Graph, var_id: str) -> ErrorInfo:
    error = graph.variable(var_id).error
    assert error is not None
    return error
