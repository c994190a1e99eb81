"""The graph as the API shows it."""

from __future__ import annotations

from typing import Any

import msgspec

from ..api import CallTiming, CallView, GraphReply, VariableView
from ..errors import ErrorInfo
from .call import Call
from .graph import Graph
from .tenants import public_id
from .variable import Variable


def call_view(call: Call) -> CallView:
    """One call; ``inputs`` and ``outputs`` map names to variables, constants are left out."""
    return CallView(
        request_id=call.request_id,
        session_id=public_id(call.session_id),
        function=call.function,
        state=call.state.value,
        objective=call.objective,
        task_group=call.task_group,
        depth=call.depth,
        engine=call.engine,
        inputs={
            name: binding.variable.id for name, binding in call.inputs.items() if binding.variable is not None
        },
        outputs={name: binding.variable.id for name, binding in call.outputs.items()},
        prompt_tokens=call.prompt_tokens,
        cached_tokens=call.cached_tokens,
        output_tokens=call.output_tokens,
        attempts=call.attempts,
        timing=_timing_view(call),
        error=_error_view(call.error),
    )


def variable_view(variable: Variable) -> VariableView:
    """One variable, without its value."""
    consumers = dict.fromkeys(consumer.call.request_id for consumer in variable.consumers)
    return VariableView(
        semantic_var_id=variable.id,
        state=variable.state.value,
        producer=variable.producer.request_id if variable.producer is not None else None,
        sources=tuple(source.id for source in variable.sources),
        consumers=tuple(consumers),
        criteria=variable.criteria,
        num_chars=len(variable.value) if variable.value is not None else None,
        error=_error_view(variable.error),
    )


def graph_view(graph: Graph) -> GraphReply:
    """All calls and variables of a session, in submit order."""
    return GraphReply(
        session_id=public_id(graph.session_id),
        calls=tuple(call_view(call) for call in graph.calls.values()),
        variables=tuple(variable_view(variable) for variable in graph.variables.values()),
    )


def _timing_view(call: Call) -> CallTiming:
    timing = call.timing
    return CallTiming(
        submitted_us=timing.submitted_us,
        ready_us=timing.ready_us,
        dispatched_us=timing.dispatched_us,
        admitted_us=timing.admitted_us,
        first_token_us=timing.first_token_us,
        finished_us=timing.finished_us,
    )


def _error_view(error: ErrorInfo | None) -> dict[str, Any] | None:
    if error is None:
        return None
    view: dict[str, Any] = msgspec.to_builtins(error)
    return view
