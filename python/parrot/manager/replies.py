"""What an engine says of the calls that it runs, carried into their graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable

from .. import wire
from ..errors import (
    EngineError,
    ErrorInfo,
    InternalError,
    InvalidRequest,
    PromptTooLong,
    TypedOutputFailed,
    UnsupportedParameter,
)
from .call import Call, OutputBinding
from .dispatcher import Dispatcher
from .early_fill import EarlyFills
from .engines import Engine
from .graph import Changes
from .knowledge import PrefixKnowledge
from .limited_log import LimitedLog
from .runs import Run

log = logging.getLogger(__name__)
# What an engine may blame: the request, or itself.
_ENGINE_CODES = {cls.code for cls in (EngineError, InvalidRequest, PromptTooLong, UnsupportedParameter)}
_MAX_BREACH_LINES = 5  # a minute
_MAX_MESSAGE = 500
_MAX_PARAM = 64
_MAX_CAUSES = 4


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
        self._breach_log = LimitedLog(log, most=_MAX_BREACH_LINES)
        self.num_breaches = 0  # replies that broke the protocol
        self._left: list[tuple[Engine, Run, int]] = []  # with the lengths of their contexts

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
            breach = run.breach(reply, engine.registration.model.vocab_size)
            if breach is not None:
                self._breached(engine, run, f"{type(reply).__name__} breaks the protocol: {breach}")
                continue
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

    def keep_contexts(self) -> None:
        """Take note of the contexts that ended runs have left: once per frame, after its dispatches."""
        left, self._left = self._left, []
        for engine, run, num_tokens in left:
            self._knowledge.left(engine, run, num_tokens)

    def _breached(self, engine: Engine, run: Run, reason: str) -> None:
        self.num_breaches += 1
        request_id = run.call.request_id
        self._breach_log.line(logging.WARNING, "call %s of engine %s: %s", request_id, engine.name, reason)
        self._dispatcher.breached(run, engine, reason)

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
                self._left.append((engine, run, reply.num_tokens))
            case wire.CallFailed():
                self._dispatcher.fail(run)
                self._fail(call, engine_error(reply.error, function=call.function))

    def _generated(self, engine: Engine, run: Run, reply: wire.GenerateDone) -> None:
        call, step, timing = run.call, run.generates[reply.verb], reply.timing
        run.num_generated += 1
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


def engine_error(error: ErrorInfo, *, function: str = "", num_causes: int = _MAX_CAUSES) -> ErrorInfo:
    """An engine's error as clients may see it: with the name of the call's ``function``, which engines do not
    know; codes of others become ``engine_error``, long text is cut."""
    message = error.message
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + " ..."
    if function:
        message = f"{function}: {message}"
    return ErrorInfo(
        error.code if error.code in _ENGINE_CODES else EngineError.code,
        message,
        None if error.param is None else error.param[:_MAX_PARAM],
        tuple(engine_error(cause, num_causes=0) for cause in error.causes[:num_causes]),
    )


def _cut(call: Call, output: OutputBinding) -> TypedOutputFailed:
    return TypedOutputFailed(
        f"call {call.name}: output {output.name!r} was cut by max_tokens = {output.sampling.max_tokens} "
        "before it was complete; raise max_tokens, or make its schema, regex or choices shorter",
        param=output.name,
    )
