"""Calls of semantic functions: what the client submitted, cut into steps, and how far each has come."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from ..errors import ErrorInfo
from ..wire import CallId, Logprobs, Objective, Sampling
from .demand import Demand
from .transforms import Chain
from .variable import Variable

Role = Literal["system", "user", "assistant", "tool"]


class CallState(enum.StrEnum):
    """WAITING for inputs; QUEUED once a step is ready; RUNNING on an engine; then one of three ends."""

    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


# Python 3.11 takes 0.3 us to look up a member of an Enum, and the life of a call has dozens of such looks.
WAITING, QUEUED, RUNNING, DONE, FAILED, CANCELLED = CallState
_ENDS = (DONE, FAILED, CANCELLED)


@dataclass(eq=False, slots=True)
class InputBinding:
    """What an input hole reads. ``text`` is there once the value is: after ``chain``, ready to be a prompt's
    text that can never become a hole or a control token. It reads ``variable``, or ``constant`` if that is
    None."""

    name: str
    variable: Variable | None
    chain: Chain
    first_step: int
    constant: str | None = None
    text: str | None = None


@dataclass(eq=False, slots=True)
class OutputBinding:
    """What an output hole writes. ``raw`` (text) and ``token_ids`` (wire.pack_ids) are what the engine
    generated, before ``chain``: a later part of the same call continues from exactly these."""

    name: str
    variable: Variable
    chain: Chain
    sampling: Sampling
    raw: str | None = None
    token_ids: bytes = b""
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class TextPart:
    """Constant text of a template. ``message`` indexes ``Call.roles``; 0 for a raw prompt."""

    text: str
    message: int


@dataclass(frozen=True, slots=True)
class InputPart:
    """An input hole; its text is ``binding.text``."""

    binding: InputBinding
    message: int


@dataclass(frozen=True, slots=True)
class OutputPart:
    """An output hole; its text in the prompt is ``binding.raw``."""

    binding: OutputBinding
    message: int


Part = TextPart | InputPart | OutputPart


@dataclass(eq=False, slots=True)
class Step:
    """One output hole with the parts since the previous one. ``first_inputs`` are those that no earlier
    step reads, once each; ``num_missing`` counts those of them that have no value yet."""

    index: int
    parts: tuple[TextPart | InputPart, ...]
    output: OutputPart
    first_inputs: tuple[InputBinding, ...] = ()
    num_missing: int = 0


@dataclass(slots=True)
class Timing:
    """Life of a call in microseconds of the manager's clock; see :class:`parrot.api.CallTiming`."""

    submitted_us: int
    ready_us: int | None = None
    dispatched_us: int | None = None
    admitted_us: int | None = None
    first_token_us: int | None = None
    finished_us: int | None = None


@dataclass(frozen=True, slots=True)
class Targets:
    """What objectives with a target ask of a call: the latest start of its next step, in microseconds of the
    manager's clock, and what one generated token may take."""

    start_by_us: int | None = None
    per_token_us: int | None = None


NO_TARGETS = Targets()
MAX_FREE_RESTARTS = 16  # for lost frames; from then on they count as retries


@dataclass(eq=False, slots=True)
class Call:
    """One call. The graph owns ``state``, ``next_step`` and ``error``; the analysis owns ``objective``,
    ``task_group``, ``depth`` and ``targets``; the executor owns timing, engine and counters, and moves the
    call with :meth:`dispatch` and :meth:`requeue`.

    ``roles`` is one role per message, None for a raw prompt. Parts after the last output are dropped: no
    token depends on them. Steps run in order; ``[next_step, num_dispatched)`` are with an engine.
    """

    call_id: CallId
    request_id: str
    session_id: str
    function: str
    model: str | None
    domain: int
    roles: tuple[Role, ...] | None
    steps: tuple[Step, ...]
    inputs: dict[str, InputBinding]
    outputs: dict[str, OutputBinding]
    demand: Demand | None  # the objective given at submit
    timing: Timing
    state: CallState = WAITING
    next_step: int = 0
    num_dispatched: int = 0
    objective: Objective = "THROUGHPUT"
    task_group: int | None = None
    depth: int | None = None
    targets: Targets = NO_TARGETS
    error: ErrorInfo | None = None
    engine: str | None = None
    attempts: int = 0
    num_free_restarts: int = 0  # that were not held against it
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def name(self) -> str:
        """How messages name the call: its function, or its request id if it has none."""
        return f"{self.function} ({self.request_id})" if self.function else self.request_id

    @property
    def ended(self) -> bool:
        """Whether the call is done, failed or cancelled."""
        return self.state in _ENDS

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts up to and with the last output, in prompt order; prefix boundaries lie between them."""
        return tuple(part for step in self.steps for part in (*step.parts, step.output))

    @property
    def num_wanted_steps(self) -> int:
        """Steps that must still run for an output that can still get a value, counted from step 0."""
        for step in reversed(self.steps):
            if step.output.binding.variable.pending:
                return step.index + 1
        return 0

    def ready_steps(self) -> tuple[Step, ...]:
        """The wanted steps from ``next_step`` on whose inputs exist, without a gap."""
        wanted = self.steps[self.next_step : self.num_wanted_steps]
        for number, step in enumerate(wanted):
            if step.num_missing:
                return wanted[:number]
        return wanted

    def dispatch(self, engine: str, steps: tuple[Step, ...] | None = None) -> tuple[Step, ...]:
        """Take the ready steps to an engine: state RUNNING, one more attempt. Returns those steps, which are
        found anew where ``steps`` does not give them."""
        steps = self.ready_steps() if steps is None else steps
        self.num_dispatched = self.next_step + len(steps)
        self.state, self.engine = RUNNING, engine
        self.attempts += 1
        return steps

    def requeue(self) -> None:
        """The engine lost the call: back to QUEUED; outputs that it had already replied stay."""
        self.num_dispatched = self.next_step
        self.state, self.engine = QUEUED, None
