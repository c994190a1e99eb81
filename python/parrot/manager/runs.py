"""One run of a call on an engine: which steps, which context, and the frame that starts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .. import wire
from .application import Application
from .call import Call, Step
from .engines import Engine
from .prompts import RunPrompt


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
    return sum(step.output.binding.sampling.max_tokens for step in steps)
