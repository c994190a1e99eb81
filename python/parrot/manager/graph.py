"""The graph of one session: calls and variables as a DAG, built just in time (paper section 4.2).

Events come in (:meth:`Graph.add`, :meth:`Graph.complete`, :meth:`Graph.fail`, ...) and :class:`Changes` go
out; the graph has no clock, does no I/O, and runs in one thread (that of the event loop). Values live until
the session ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..api import Criteria, SubmitBody
from ..errors import ErrorInfo
from ..wire import CallId
from .call import Call
from .variable import Variable


@dataclass(slots=True)
class Changes:
    """What an event did. ``ready``: calls that went from WAITING to QUEUED; schedule them. ``ended``: calls
    that are done, failed or cancelled now. ``stopped``: those of ``ended`` that were queued or have steps
    with an engine; take them out of the scheduler and abort them."""

    ready: list[Call] = field(default_factory=list)
    ended: list[Call] = field(default_factory=list)
    stopped: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class Submitted:
    """The calls of one submit in its order, and what inserting them did."""

    calls: list[Call]
    changes: Changes


class Graph:
    """Calls and variables of one session. Errors raised by a method leave the graph unchanged."""

    session_id: str
    calls: dict[CallId, Call]  # ended ones too, in submit order
    live: dict[str, Call]  # by request id, those that have not ended
    variables: dict[str, Variable]

    # --- events ---
    def add(self, body: SubmitBody, *, now_us: int) -> Submitted: ...
    def set_value(self, var_id: str, value: str) -> Changes: ...
    def complete(self, call: Call, step: int, text: str, token_ids: bytes = b"") -> Changes: ...
    def fail(self, call: Call, error: ErrorInfo) -> Changes: ...
    def cancel(self, var_id: str) -> Changes: ...
    def close(self, error: ErrorInfo) -> Changes: ...
    def label(self, var_id: str, criteria: Criteria) -> None: ...
    def variable(self, var_id: str) -> Variable: ...

    # --- primitives of the paper (figure 8) ---
    def get_producer(self, var_id: str) -> Call | None: ...
    def get_consumers(self, var_id: str) -> tuple[Call, ...]: ...
    def prefix_hash(self, call: Call, boundary: int) -> bytes: ...
    def get_perf_obj(self, var_id: str) -> Criteria | None: ...
    def set_objective(
        self, call: Call, objective: Criteria, *, task_group: int | None = None, depth: int | None = None
    ) -> bool: ...
