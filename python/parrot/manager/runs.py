"""One run of a call on an engine: which steps, which context, and the frame that starts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from .. import wire
from .application import Application
from .call import Call, Step
from .clock import now_us
from .engines import Engine
from .prompts import RunPrompt

# A step brings every running call a token further, and one that still reads its prompt by more than a block.
# A call that has not ended in ten times the steps that this takes has been lost there.
_TIMES_OVERDUE = 10
_PROMPT_TOKENS_PER_STEP = 16
_SPARE_STEPS = 100  # until it is admitted


@dataclass(eq=False, slots=True)
class Run:
    """A call queued in the scheduler or with an engine. Its ids are never used again: a call that runs a
    second time is a new run, so that a late reply to the first cannot touch it."""

    run_id: wire.CallId
    context_id: wire.ContextId
    call: Call
    application: Application
    prompt: RunPrompt
    steps: tuple[Step, ...] = ()  # set at dispatch
    engine: Engine | None = None
    generates: dict[int, Step] = field(default_factory=dict)  # by index of the verb
    cached_tokens: int = 0
    sent_us: int = 0
    sent_at_step: int = 0  # of its engine
    num_generated: int = 0  # of ``generates``, those that were replied; in their order

    def dispatch(self, steps: Sequence[Step], parent: wire.ContextId) -> wire.Dispatch:
        """All verbs of these steps as one frame. ``parent`` is where the engine may find the prefix."""
        self.steps = tuple(steps)
        verbs: list[wire.Verb] = []
        public_len = self.prompt.public_len
        for step, ids in zip(steps, (self.prompt.first, *self.prompt.later), strict=True):
            if len(ids):
                verbs.append(wire.Fill(wire.pack_ids(ids), self.context_id, parent, public_len))
                public_len = 0
            self.generates[len(verbs)] = step
            verbs.append(wire.Generate(step.output.binding.sampling, self.context_id, parent))
        return wire.Dispatch(
            call_id=self.run_id,
            domain=self.call.domain,
            app_arrival_us=self.application.arrival_us,
            objective=self.call.objective,
            verbs=tuple(verbs),
            stream=self.application.single is not None and self.application.single.stream,
        )

    def breach(self, reply: wire.Reply, vocab_size: int) -> str | None:
        """Why an engine that keeps to the protocol cannot have sent this reply, which names this run."""
        match reply:
            case wire.GenerateDone():
                due = next(islice(self.generates, self.num_generated, None), None)
                if due != reply.verb:
                    expected = "none was due" if due is None else f"verb {due} was due"
                    return f"an output of verb {reply.verb} came when {expected}"
                wrong = _wrong_ids(reply.token_ids, vocab_size)
                for logprobs in (reply.logprobs, reply.prompt_logprobs):
                    if logprobs is not None:
                        wrong = wrong or _wrong_logprobs(logprobs)
                return wrong
            case wire.Chunk() if reply.logprobs is not None:
                return _wrong_logprobs(reply.logprobs)
            case wire.CallDone() if self.num_generated < len(self.generates):
                return f"it ended with {self.num_generated} of {len(self.generates)} outputs"
        return None

    def placed(self, engine: Engine) -> None:
        """The scheduler has chosen an engine for it."""
        self.engine = engine
        engine.num_dispatched += 1
        self.application.run_placed(now_us())

    def left(self) -> None:
        """It is queued or with an engine no more."""
        if self.engine is not None:
            self.engine.num_dispatched -= 1
            self.application.run_left(now_us())

    def sent(self, now: int) -> None:
        """Its frame goes to its engine now."""
        self.sent_us = now
        self.sent_at_step = self._engine_step()

    def overdue(self, now: int, after_us: int) -> str | None:
        """Why its engine must have lost it: it makes steps, for ``after_us`` at least and far more than the
        run takes. They are counted, and no time is expected: a slow engine is not a wrong one."""
        if not self.steps or now - self.sent_us <= after_us:
            return None
        enough = num_new_tokens(self.steps) + self.prompt.num_tokens // _PROMPT_TOKENS_PER_STEP + _SPARE_STEPS
        num_made = self._engine_step() - self.sent_at_step
        if num_made <= _TIMES_OVERDUE * enough:
            return None
        return f"it did not end in {num_made} steps of the engine, of which {enough} are enough"

    def _engine_step(self) -> int:
        stats = None if self.engine is None else self.engine.stats
        return 0 if stats is None else stats.num_steps

    def early_fill(self) -> wire.Dispatch:
        """The prompt as a prefix to be filled ahead of the calls that begin with it."""
        return wire.Dispatch(
            call_id=self.run_id,
            domain=self.call.domain,
            app_arrival_us=self.application.arrival_us,
            objective="THROUGHPUT",
            verbs=(
                wire.Fill(
                    wire.pack_ids(self.prompt.first), self.context_id, public_len=self.prompt.public_len
                ),
            ),
            early_fill=True,
        )


def num_new_tokens(steps: Sequence[Step]) -> int:
    """Tokens that these steps may generate."""
    num_tokens = 0
    for step in steps:
        num_tokens += step.output.binding.sampling.max_tokens
    return num_tokens


def _wrong_ids(token_ids: bytes, vocab_size: int) -> str | None:
    if len(token_ids) % 4:
        return f"token ids of {len(token_ids)} bytes"
    ids = memoryview(token_ids).cast("I")  # in which a negative id is a large one
    if max(ids, default=0) >= vocab_size:
        return f"token ids outside the vocabulary [0, {vocab_size})"
    return None


def _wrong_logprobs(logprobs: wire.Logprobs) -> str | None:
    num_bytes, num_top_bytes = len(logprobs.token_ids), len(logprobs.token_ids) * logprobs.num_top
    lengths = len(logprobs.values), len(logprobs.top_ids), len(logprobs.top_values)
    if num_bytes % 4 or lengths != (num_bytes, num_top_bytes, num_top_bytes):
        return (
            f"log-probabilities of {num_bytes} bytes of ids, num_top = {logprobs.num_top} and {lengths} bytes"
        )
    return None
