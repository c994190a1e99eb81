"""Bodies that go out: answers, views of calls, variables and engines, and errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .common import Body, Criteria


class SubmittedCall(Body):
    """What a call became: its id, and the variable of each output."""

    request_id: str
    outputs: dict[str, str]


class SubmitReply(Body):
    """One entry per submitted call, in order. ``durable``: the session survives the service's own death, so
    that a client that cannot reach it may try again."""

    session_id: str
    calls: tuple[SubmittedCall, ...]
    durable: bool = False


class IdLogprob(Body):
    """An id, its text (bytes that are no whole character as U+FFFD), and its log-probability."""

    token_id: int
    text: str
    logprob: float


class TokenLogprobs(IdLogprob):
    """A generated id, and the likeliest ids in its place, likeliest first. The probabilities are the
    model's own, before any sampling parameter."""

    top: tuple[IdLogprob, ...] = ()


class GetReply(Body):
    """The value, or ``pending`` when the time ran out first. A failed variable is an HTTP error instead.
    ``logprobs`` has what the engine generated, before transforms, if the output asked for it."""

    semantic_var_id: str
    status: Literal["ready", "pending"]
    value: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class SessionReply(Body):
    """A new session; it expires after ``idle_s`` seconds without a request."""

    session_id: str
    idle_s: float


class CallTiming(Body):
    """Where a call's time went, in microseconds of the manager's clock (engine times are shifted onto it).
    A time that has not come yet is null."""

    submitted_us: int
    ready_us: int | None = None  # its inputs existed
    dispatched_us: int | None = None
    admitted_us: int | None = None  # the engine began its prefill
    first_token_us: int | None = None
    finished_us: int | None = None


class CallView(Body):
    """A call as the graph shows it."""

    request_id: str
    session_id: str
    function: str
    state: Literal["waiting", "queued", "running", "done", "failed", "cancelled"]
    objective: Literal["LATENCY", "THROUGHPUT"]
    task_group: int | None = None
    depth: int | None = None
    engine: str | None = None
    inputs: dict[str, str]
    outputs: dict[str, str]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 0
    timing: CallTiming
    error: dict[str, Any] | None = None


class VariableView(Body):
    """A variable as the graph shows it; values are left out."""

    semantic_var_id: str
    state: Literal["pending", "ready", "failed"]
    producer: str | None = None  # request_id, or null for a set or derived variable
    sources: tuple[str, ...] = ()  # of a derived variable
    consumers: tuple[str, ...] = ()
    criteria: Criteria | None = None
    num_chars: int | None = None
    error: dict[str, Any] | None = None


class GraphReply(Body):
    """A session's calls and variables."""

    session_id: str
    calls: tuple[CallView, ...]
    variables: tuple[VariableView, ...]


class CallsReply(Body):
    """Recently ended calls, oldest first (a bounded ring)."""

    calls: tuple[CallView, ...]


class EngineView(Body):
    """An engine as the manager sees it."""

    name: str
    alive: bool
    state: str  # ready, silent, draining, stalled, lost or left
    pid: int
    model: str
    device: str
    dtype: str
    cost_model: dict[str, float]  # of now: the engine keeps it fresh from its steps
    num_cost_changes: int  # since it was measured at the engine's start
    capacity_tokens_at: dict[
        str, int
    ]  # by ms per output token: KV tokens, in sequences of 1024, that allow it
    stats: dict[str, int]
    num_dispatched: int  # calls sent to it that have not ended
    slowdown: float  # how many times what the cost model says its steps take


class EnginesReply(Body):
    """All engines that ever registered under a name, newest state of each. ``scheduler`` counts placements by
    reason (``placed_group``, ``placed_prefix``, ...)."""

    engines: tuple[EngineView, ...]
    scheduler: dict[str, int] = Field(default_factory=dict)


class ErrorDetail(Body):
    """An error body, compatible with OpenAI's: ``type`` repeats the class, ``causes`` are outermost first."""

    code: str
    message: str
    type: str
    param: str | None = None
    causes: tuple[ErrorDetail, ...] = ()


class ErrorReply(Body):
    """Every 4xx and 5xx answer."""

    error: ErrorDetail
