"""Bodies of the HTTP API (``/v1/session``, ``/v1/submit``, ``/v1/get``, ...), for front end and manager.

The manager's app is the only place that sees JSON; these models are its schema, and the front end builds its
requests from them, so that both sides agree by construction. Unknown fields are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

# Any constraint makes pydantic refuse half surrogate pairs, which JSON can carry and UTF-8 cannot.
Text = Annotated[str, Field(min_length=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,127}$")]
VarId = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]
RequestId = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]
SessionId = Annotated[str, Field(pattern=r"^s-[0-9a-f]{32}$")]
Criteria = Literal["LATENCY", "THROUGHPUT", "TTFT", "TPOT", "DEADLINE"]
TargetMs = Annotated[float, Field(gt=0.0, le=86_400_000.0)]


class Body(BaseModel):
    """Base of all bodies: frozen, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_target(criteria: Criteria | None, target_ms: float | None) -> float | None:
    has_target = criteria in ("TTFT", "TPOT", "DEADLINE")
    if has_target and target_ms is None:
        raise ValueError(f"{criteria} needs one")
    if target_ms is not None and not has_target:
        raise ValueError(f"it goes with TTFT, TPOT or DEADLINE, not with {criteria}")
    return target_ms


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Choice = Annotated[str, Field(min_length=1, max_length=4096)]
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_SCHEMA_DEPTH = 64


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class SamplingBody(Body):
    """How one output is decoded, in OpenAI's and vLLM's words (docs/sampling.md). ``max_tokens`` None: the
    service's default. At most one of ``schema`` (JSON that is valid under it), ``regex`` (the whole
    text matches) and ``choices`` (the text is one of them) constrains the text."""

    model_config = ConfigDict(populate_by_name=True)

    max_tokens: int | None = Field(default=None, ge=1, le=2**20)
    temperature: float = Field(default=0.0, ge=0.0, le=10.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, lt=2**31)  # 0 and -1: off
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=1e-6, le=10.0)
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict, max_length=1024)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=16)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=128)
    min_tokens: int = Field(default=0, ge=0, le=2**20)
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)  # alternatives beside each id's own
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)  # not in a session
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    regex: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None
    choices: Annotated[tuple[Choice, ...], Field(min_length=1, max_length=4096)] | None = None

    @field_validator("min_tokens")
    @classmethod
    def _not_above_max_tokens(cls, value: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens")
        if max_tokens is not None and value > max_tokens:
            raise ValueError(f"it is above max_tokens = {max_tokens}; lower it")
        return value

    @field_validator("json_schema")
    @classmethod
    def _not_too_deep(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        level: list[Any] = [value]
        for _ in range(MAX_SCHEMA_DEPTH):
            level = [inner for outer in level for inner in _inside(outer)]
            if not level:
                return value
        raise ValueError(f"it is nested more than {MAX_SCHEMA_DEPTH} deep; use $defs and $ref")

    @field_validator("json_schema", "regex", "choices")
    @classmethod
    def _alone(cls, value: Any, info: ValidationInfo) -> Any:
        """A constraint says itself where the text ends, so nothing else may cut it or go on after it."""
        if value is None:
            return value
        for name in ("json_schema", "regex", "stop", "stop_token_ids", "min_tokens", "ignore_eos"):
            if info.data.get(name):
                shown = "schema" if name == "json_schema" else name
                raise ValueError(f"it cannot be combined with {shown}; leave one of them out")
        return value


class Strip(Body):
    """Remove white space (or ``chars``) at both ends, of each item if it is a list."""

    op: Literal["strip"] = "strip"
    chars: str | None = Field(default=None, max_length=64)


class Regex(Body):
    """First match of ``pattern`` (RE2 syntax); the value becomes ``group``: 0 = all, a number, a name. With
    ``every`` it becomes the list of that group in all matches, which may be empty."""

    op: Literal["regex"] = "regex"
    pattern: str = Field(max_length=4096)
    group: int | Text = 0
    every: bool = False


class JsonPath(Body):
    """Parse the value as JSON (a fenced block is unwrapped) and take what ``path`` selects first."""

    op: Literal["json"] = "json"
    path: str = Field(default="$", max_length=1024)


class Split(Body):
    """Split text into a list at ``separator``; empty items are dropped unless ``keep_empty``. With ``quoted``
    the text is CSV: lines end items too, and an item in double quotes may contain separators."""

    op: Literal["split"] = "split"
    separator: str = Field(min_length=1, max_length=256)
    keep_empty: bool = False
    quoted: bool = False

    @model_validator(mode="after")
    def _quoted_needs_one_character(self) -> Split:
        if self.quoted and (len(self.separator) > 1 or self.separator in '\r\n" '):
            raise ValueError(
                "with quoted, the separator is one character other than a space, a quote or a line end"
            )
        return self


class Item(Body):
    """One item of a list, negative from the end, or one value of an object by key."""

    op: Literal["item"] = "item"
    index: int | Text


class Join(Body):
    """Join the items of a list into text."""

    op: Literal["join"] = "join"
    separator: str = Field(default="\n", max_length=256)


class Template(Body):
    """Put the value into ``text`` at every ``{{value}}``."""

    op: Literal["template"] = "template"
    text: str = Field(max_length=65536)


class Lines(Body):
    """The lines of a text as a list, without white space at both ends; empty lines are dropped. ``bullets``
    also removes what begins the item of a list: ``-``, ``*``, ``+``, a bullet, ``1.`` or ``1)``."""

    op: Literal["lines"] = "lines"
    bullets: bool = False


class ToNumber(Body):
    """Text that is a decimal number (``-1``, ``2.50``, ``1e3``, ``1,234``) as a number; also each item."""

    op: Literal["to-number"] = "to-number"


class Default(Body):
    """``value`` instead, if an operator before it failed or the value is null or empty."""

    op: Literal["default"] = "default"
    value: Text = Field(max_length=65536)


Transform = Annotated[
    Strip | Regex | JsonPath | Split | Item | Join | Template | Lines | ToNumber | Default,
    Field(discriminator="op"),
]
Transforms = Annotated[tuple[Transform, ...], Field(max_length=32)]


class SourceBody(Body):
    """One variable that a derived variable reads, and what happens to its value first."""

    semantic_var_id: VarId
    transforms: Transforms = ()


class VariableBody(Body):
    """A variable that is set (``value``), derived (``sources`` joined by ``separator``, then
    ``transforms``), or merely declared: its producer or value comes later."""

    semantic_var_id: VarId
    value: Text | None = None
    sources: tuple[SourceBody, ...] | None = Field(default=None, min_length=1, max_length=65536)
    separator: str = Field(default="\n", max_length=256)
    transforms: Transforms = ()

    @model_validator(mode="after")
    def _one_origin(self) -> VariableBody:
        if self.value is not None and self.sources is not None:
            raise ValueError("a variable has a value or sources, not both")
        return self


class PlaceholderBody(Body):
    """Binds one hole of the template. An input has a ``semantic_var_id``, or a constant ``value`` (text that
    can never become a hole or a control token), or both (a new variable set to the value). An output has a
    ``semantic_var_id`` (made up by the client or, when absent, by the service) and may say how it is decoded.
    ``transforms`` apply to the value on its way in (input) or out (output)."""

    name: Name
    kind: Literal["input", "output"]
    semantic_var_id: VarId | None = None
    value: Text | None = None
    transforms: Transforms = ()
    sampling: SamplingBody | None = None


class MessageBody(Body):
    """One message of a chat prompt; ``content`` is a template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text


class CallBody(Body):
    """One call of a semantic function: ``prompt`` or ``messages``, unrendered, a binding for each hole."""

    function: Annotated[str, Field(max_length=256)] = ""
    request_id: RequestId | None = None
    model: Text | None = None
    prompt: Text | None = None
    messages: tuple[MessageBody, ...] | None = Field(default=None, min_length=1, max_length=4096)
    placeholders: tuple[PlaceholderBody, ...] = Field(default=(), max_length=4096)
    objective: Criteria | None = None
    target_ms: TargetMs | None = Field(default=None, validate_default=True)

    @field_validator("target_ms")
    @classmethod
    def _goes_with_criteria(cls, value: float | None, info: ValidationInfo) -> float | None:
        return _check_target(info.data.get("objective"), value)

    @model_validator(mode="after")
    def _one_prompt(self) -> CallBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a call has either a prompt or messages")
        return self


class LabelBody(Body):
    """The objective of a variable that a get will ask for: it travels with the submit, so that labels arrive
    with the graph. ``target_ms`` goes with three of them and counts from now: TTFT, the first token; TPOT,
    each token; DEADLINE, the value, which fails as ``deadline_exceeded`` after that."""

    semantic_var_id: VarId
    criteria: Criteria
    target_ms: TargetMs | None = Field(default=None, validate_default=True)

    @field_validator("target_ms")
    @classmethod
    def _goes_with_criteria(cls, value: float | None, info: ValidationInfo) -> float | None:
        return _check_target(info.data.get("criteria"), value)


class SubmitBody(Body):
    """A batch of variables, calls and labels, taken whole or refused whole. With ``create_session`` the
    client's own random ``session_id`` is created on the way (409 if it exists). A client that lost the answer
    sends the body again: with the ``submit_id`` of a submit that the session has taken, it is answered again
    and nothing runs twice."""

    session_id: SessionId
    submit_id: RequestId | None = None
    create_session: bool = False
    variables: tuple[VariableBody, ...] = ()
    calls: tuple[CallBody, ...] = ()
    labels: tuple[LabelBody, ...] = ()
    _text: bytes | None = PrivateAttr(default=None)

    def came_as(self, text: bytes) -> SubmitBody:
        """This body, which was read from ``text``."""
        self._text = text
        return self

    def to_json(self) -> bytes:
        """What it was read from, or else what could be."""
        return self._text or self.model_dump_json(exclude_unset=True, by_alias=True).encode()


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


class GetBody(Body):
    """Wait for a variable. ``timeout_ms`` 0 polls; absent waits until the variable ends. ``criteria`` and
    ``target_ms`` label it (:class:`LabelBody`)."""

    session_id: SessionId
    semantic_var_id: VarId
    criteria: Criteria | None = None
    target_ms: TargetMs | None = Field(default=None, validate_default=True)
    timeout_ms: int | None = Field(default=None, ge=0, le=86_400_000)

    @field_validator("target_ms")
    @classmethod
    def _goes_with_criteria(cls, value: float | None, info: ValidationInfo) -> float | None:
        return _check_target(info.data.get("criteria"), value)


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


class SetBody(Body):
    """Give a variable its value from outside. The same value again is taken, another one is a 409."""

    session_id: SessionId
    semantic_var_id: VarId
    value: Text


class CancelBody(Body):
    """Cancel a variable: it ends as ``cancelled`` and calls that nobody else needs stop within one step."""

    session_id: SessionId
    semantic_var_id: VarId


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
    state: str  # ready, silent, draining, stalled or lost
    pid: int
    model: str
    device: str
    dtype: str
    cost_model: dict[str, float]
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
