"""The graph as the API shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ..api import CallTiming, CallView, GraphReply, VariableView
from ..errors import ErrorInfo
from ..wire import Objective
from .call import Call, CallState, Timing
from .graph import Graph
from .tenants import public_id
from .variable import Variable


@dataclass(frozen=True, slots=True, eq=False)
class CallRecord:
    """What is shown of a call, without the graph that it is in. Every ended call gets one and few are looked
    at, so that it is made of what is there."""

    request_id: str
    session_id: str
    function: str
    state: CallState
    objective: Objective
    task_group: int | None
    depth: int | None
    engine: str | None
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    tokens: tuple[int, int, int]  # prompt, cached, output
    attempts: int
    timing: Timing
    error: ErrorInfo | None

    @classmethod
    def of(cls, call: Call) -> CallRecord:
        """The call as it is now. Its timing is not copied: it is final once the call has ended."""
        return cls(
            call.request_id,
            call.session_id,
            call.function,
            call.state,
            call.objective,
            call.task_group,
            call.depth,
            call.engine,
            tuple((b.name, b.variable.id) for b in call.inputs.values() if b.variable is not None),
            tuple((binding.name, binding.variable.id) for binding in call.outputs.values()),
            (call.prompt_tokens, call.cached_tokens, call.output_tokens),
            call.attempts,
            call.timing,
            call.error,
        )

    def view(self) -> CallView:
        """As the API shows it; ``inputs`` and ``outputs`` map names to variables, constants are left out."""
        prompt_tokens, cached_tokens, output_tokens = self.tokens
        return CallView(
            request_id=self.request_id,
            session_id=public_id(self.session_id),
            function=self.function,
            state=self.state.value,
            objective=self.objective,
            task_group=self.task_group,
            depth=self.depth,
            engine=self.engine,
            inputs=dict(self.inputs),
            outputs=dict(self.outputs),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            attempts=self.attempts,
            timing=_timing_view(self.timing),
            error=_error_view(self.error),
        )


def call_view(call: Call) -> CallView:
    """One call, as it is now."""
    return CallRecord.of(call).view()


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


def _timing_view(timing: Timing) -> CallTiming:
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
