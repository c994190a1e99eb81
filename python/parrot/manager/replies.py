"""What an engine says of the calls that it runs, carried into their graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable

from .. import wire
from ..errors import ErrorInfo, InternalError, TypedOutputFailed
from .call import Call, OutputBinding
from .dispatcher import Dispatcher
from .early_fill import EarlyFills
from .engines import Engine
from .graph import Changes
from .knowledge import PrefixKnowledge
from .runs import Run

log = logging.getLogger(__name__)


class ReplyHandler:
    """``apply`` carries out what a reply did to a graph, ``fail`` ends a call; a turn must follow."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        knowledge: PrefixKnowledge,
        early: EarlyFills,
        *,
        apply: Callable[[Changes], None],
        fail: Callable[[Call, ErrorInfo], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._knowledge = knowledge
        self._early = early
        self._apply = apply
        self._fail = fail

    def handling(self, engine: Engine, replies: Iterable[wire.Reply]) -> Generator[None, None, None]:
        """All replies of one step, in order; yields whenever a call has left the engine."""
        for reply in replies:
            if isinstance(reply, wire.ContextsEvicted):
                self._knowledge.evicted(engine, reply)
                continue
            if isinstance(reply, wire.ContextSnapshot):
                self._knowledge.reported(engine, reply)
                continue
            run = self._dispatcher.run(reply.call_id, engine)
            if run is None:
                self._early.replied(engine, reply)
                continue  # late: the call was stopped, or runs elsewhere
            try:
                self._replied(engine, run, reply)
            except Exception as error:
                log.exception("reply %s of %s could not be handled", type(reply).__name__, engine.name)
                message = (
                    f"call {run.call.name}: {type(error).__name__} in the service; its log has the trace"
                )
                self._fail(run.call, InternalError(message).to_info())
            if isinstance(reply, wire.CallDone | wire.CallFailed):
                yield

    def _replied(self, engine: Engine, run: Run, reply: wire.Reply) -> None:
        call, single = run.call, run.application.single
        match reply:
            case wire.FillDone():
                run.cached_tokens += reply.cached_tokens
                call.cached_tokens = min(run.cached_tokens, call.prompt_tokens)
                if reply.verb == 0:
                    self._early.found(run, reply.cached_tokens)
            case wire.Chunk():
                if single is not None:
                    single.received(reply.text, reply.logprobs)
            case wire.GenerateDone():
                if single is not None:
                    single.generated(reply)
                self._generated(engine, run, reply)
            case wire.CallDone():
                self._dispatcher.finish(run, reply.num_tokens)
                self._knowledge.left(engine, run, reply.num_tokens)
            case wire.CallFailed():
                self._dispatcher.fail(run)
                self._fail(call, reply.error)

    def _generated(self, engine: Engine, run: Run, reply: wire.GenerateDone) -> None:
        call, step, timing = run.call, run.generates[reply.verb], reply.timing
        if step.index == 0:
            call.timing.admitted_us = engine.clock.to_manager_us(timing.admitted_us)
            call.timing.first_token_us = engine.clock.to_manager_us(timing.first_token_us)
        call.timing.finished_us = engine.clock.to_manager_us(timing.finished_us)
        call.output_tokens += reply.num_generated
        if step is run.steps[-1]:
            self._dispatcher.settle(run)
        binding = step.output.binding
        binding.logprobs = reply.logprobs
        is_cut = reply.finish_reason == "length" and binding.sampling.grammar is not None
        if is_cut and run.application.single is None:
            self._fail(call, _cut(call, binding).to_info())
            return
        graph = run.application.session.graph
        self._apply(graph.complete(call, step.index, reply.text, reply.token_ids))


def _cut(call: Call, output: OutputBinding) -> TypedOutputFailed:
    return TypedOutputFailed(
        f"call {call.name}: output {output.name!r} was cut by max_tokens = {output.sampling.max_tokens} "
        "before it was complete; raise max_tokens, or make its schema, regex or choices shorter",
        param=output.name,
    )
