"""How values and failures spread through a graph: one :class:`Flow` works off one event.

Spreading is iterative, so that a chain of any length is safe. Each variable ends once, each call ends once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..errors import Cancelled, ErrorInfo, ParrotError, TransformFailed, UpstreamFailed, ValueTooLarge
from .call import CANCELLED, DONE, FAILED, QUEUED, WAITING, Call, InputBinding
from .transforms import Deferred, Failure, Need, Transformer, Work
from .value_bytes import ValueBytes
from .variable import Consumer, Variable

_MAX_CAUSES = 8
_MAX_SOURCES_SHOWN = 3
_CANCEL_CODES = ("cancelled", "session_closed", "deadline_exceeded")


@dataclass(slots=True)
class Changes:
    """What an event did. ``variables`` have ended, in this order. ``ready``: calls that went from WAITING to
    QUEUED; schedule them. ``ended``: calls that are done, failed or cancelled now. ``stopped``: those of
    ``ended`` that were queued or have steps with an engine; take them out of the scheduler and abort them.
    ``later``: what the event has still to do."""

    variables: list[Variable] = field(default_factory=list)
    ready: list[Call] = field(default_factory=list)
    ended: list[Call] = field(default_factory=list)
    stopped: list[Call] = field(default_factory=list)
    later: Later | None = None


@dataclass(slots=True)
class Later:
    """Deliveries of an event whose transforms would hold the loop: do :attr:`work` elsewhere or, if there is
    none, let the loop turn; then :meth:`go_on`. Whatever else happens to the graph may come in between."""

    tenant: int
    session_id: str
    _flow: Flow
    _finish: Callable[[Flow], Changes]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do, since the session has ended."""
        return not self._flow.is_deferred

    @property
    def work(self) -> Work | None:
        """What the next delivery waits for."""
        return self._flow.work

    def go_on(self, work: Work | None, done: tuple[str | Failure, float] | None) -> Changes:
        """``done``: result of the work, and the processor time that it took."""
        self._flow.go_on(work, done)
        return self._finish(self._flow)

    def fail(self, calls: Iterable[Call], error: ErrorInfo) -> Changes:
        """The event cannot go on: what it has left ends with ``error``, and so do ``calls``."""
        self._flow.fail(calls, error)
        return self._finish(self._flow)


@dataclass(frozen=True, slots=True)
class _Delivery:
    """One that waits for its transform: ``again`` is how to try again, ``fail`` how to end it without."""

    need: Need
    again: Callable[[], None]
    fail: Callable[[ErrorInfo], None]


class Flow:
    """Give variables their ends, then :meth:`run`, then take ``changes``."""

    def __init__(self, max_value_bytes: int, values: ValueBytes, *, may_defer: bool = False) -> None:
        """``values`` counts what comes to exist, except for what is given to :meth:`publish`."""
        self.changes = Changes()
        self._max_value_bytes = max_value_bytes
        self._values = values
        self._kept: dict[int, str] = {}  # by identity: equal chains of one value give one string
        self._transformer = Transformer(max_value_bytes, may_defer=may_defer)
        self._deferred: deque[_Delivery] = deque()
        self._ended: deque[Variable] = deque()
        self._unread: dict[Variable, None] = {}  # lost a reader that will never run

    def publish(self, variable: Variable, value: str) -> None:
        """The variable has its value."""
        variable.end(value, None)
        self._ended.append(variable)

    def written(self, call: Call, step: int) -> None:
        """The engine has generated the output of a step, which is in its binding."""
        if call.steps[step].output.binding.variable.pending:
            self._publish_output(call, step)
        self.run()
        self.settle(call)
        self.wake(call)

    def _publish_output(self, call: Call, step: int) -> None:
        """What was generated, through the output's transforms, is its variable's value."""
        binding = call.steps[step].output.binding
        try:
            where = f"call {call.name}, output {binding.name!r}"
            value = self._transformer.apply(binding.chain, binding.raw or "", where=where)
            self._keep(value, where)
        except Deferred as deferred:
            fail = partial(self._break_pending, binding.variable)
            self._deferred.append(_Delivery(deferred.need, partial(self.written, call, step), fail))
        except (TransformFailed, ValueTooLarge) as error:
            self.break_variable(binding.variable, error.to_info())
        else:
            self.publish(binding.variable, value)

    def break_variable(self, variable: Variable, error: ErrorInfo) -> None:
        """The variable will have no value."""
        variable.end(None, error)
        self._ended.append(variable)
        self._unread.update(dict.fromkeys(variable.sources))
        if variable.producer is not None:
            self.settle(variable.producer)

    def _break_pending(self, variable: Variable, error: ErrorInfo) -> None:
        if variable.pending:
            self.break_variable(variable, error)

    def break_steps(self, call: Call, first_step: int, error: ErrorInfo) -> None:
        """The steps of a call from ``first_step`` on will not run."""
        for step in call.steps[first_step:]:
            variable = step.output.binding.variable
            if variable.pending:
                variable.end(None, error)
                self._ended.append(variable)
        self.settle(call)

    def run(self) -> Changes:
        """Spread everything; returns the changes so far."""
        while self._ended:
            variable = self._ended.popleft()
            self.changes.variables.append(variable)
            for derived in variable.derived:
                self.deliver_source(derived, variable)
            for consumer in variable.consumers:
                self.deliver(consumer)
        self.changes.ready = [call for call in self.changes.ready if not call.ended]
        return self.changes

    def delivering_existing(
        self, calls: Iterable[Call], derived: Iterable[Variable]
    ) -> Generator[None, None, None]:
        """Deliver constants and values that exist to calls and derived variables that have none of them;
        yields in between."""
        inputs = [
            Consumer(call, binding)
            for call in calls
            for binding in call.inputs.values()
            if binding.text is None and (binding.variable is None or not binding.variable.pending)
        ]
        sources = [
            (variable, source) for variable in derived for source in variable.sources if not source.pending
        ]
        for consumer in inputs:
            self.deliver(consumer)
            yield
        for variable, source in sources:
            self.deliver_source(variable, source)
            yield

    def deliver(self, consumer: Consumer) -> None:
        """An input of a call has ended (or is a constant)."""
        call, binding = consumer
        if call.ended:
            return
        source = binding.variable
        if source is not None and source.error is not None:
            self.break_steps(call, binding.first_step, _input_failed(call, binding, source.error))
            return
        value = source.value if source is not None else binding.constant
        try:
            where = f"call {call.name}, input {binding.name!r}"
            binding.text = self._transformer.apply(binding.chain, value or "", where=where)
            if binding.text is not value:
                self._keep(binding.text, where)
        except Deferred as deferred:
            fail = partial(self.break_steps, call, binding.first_step)
            self._deferred.append(_Delivery(deferred.need, partial(self.deliver, consumer), fail))
            return
        except (TransformFailed, ValueTooLarge) as error:
            self.break_steps(call, binding.first_step, error.to_info())
            return
        step = call.steps[binding.first_step]
        step.num_missing -= 1
        if step.num_missing == 0:
            self.wake(call)

    def deliver_source(self, derived: Variable, source: Variable) -> None:
        """One source entry of a derived variable has ended."""
        if not derived.pending:
            return
        if source.error is not None:
            message = f"variable {derived.id} derives from variable {source.id}, which failed"
            self.break_variable(derived, _upstream(message, source.error))
            return
        derived.num_missing_sources -= 1
        if derived.num_missing_sources == 0:
            self._derive(derived)

    def wake(self, call: Call) -> None:
        """Queue a waiting call if its next step has all its inputs."""
        if call.state is WAITING and call.ready_steps():
            call.state = QUEUED
            self.changes.ready.append(call)

    def settle(self, call: Call) -> None:
        """End a call that has no step left to run; inputs of steps that it gave up have a reader less."""
        num_wanted = call.num_wanted_steps
        if call.ended:
            return
        for binding in call.inputs.values():
            source = binding.variable
            if binding.first_step >= num_wanted and source is not None and source.producer is not call:
                self._unread[source] = None
        if num_wanted == 0:  # also one whose outputs are all written may wait for their transforms
            self._end(call)

    @property
    def is_deferred(self) -> bool:
        """Whether deliveries wait for their transforms."""
        return bool(self._deferred)

    @property
    def work(self) -> Work | None:
        """What the first of them waits for; None if that is only the next turn of the loop."""
        return self._transformer.work(self._deferred[0].need) if self._deferred else None

    def go_on(self, work: Work | None, done: tuple[str | Failure, float] | None) -> None:
        """Deliver in the same order until one is heavy or the loop has to turn again; then take the new
        ``changes``."""
        self.changes = Changes()
        self._transformer.next_slice()
        if work is not None and done is not None:
            self._transformer.worked(work, *done)
        while self._deferred and self._transformer.may_ask(self._deferred[0].need):
            self._deferred[0].again()
            self._deferred.popleft()  # not before: if that raises, it is still there to fail

    def fail(self, calls: Iterable[Call], error: ErrorInfo) -> None:
        """End ``calls`` and all that waits for a transform with ``error``; then take the new ``changes``."""
        self.changes = Changes()
        for call in calls:
            if not call.ended:
                self.break_steps(call, call.next_step, error)
        while self._deferred:
            self._deferred.popleft().fail(error)
            self.run()  # which may defer more: of what had its value, and was not delivered yet

    def give_up(self) -> None:
        """The session has ended: nothing more is delivered."""
        self._deferred.clear()

    def cancel_unread(self) -> None:
        """End as cancelled, upwards, what nobody needs since its last reader went."""
        while self._unread:
            variable, _ = self._unread.popitem()
            has_origin = variable.producer is not None or variable.derivation is not None
            if variable.pending and has_origin and not _is_wanted(variable):
                message = f"{variable.name}: everything that needed it was cancelled"
                self.break_variable(variable, Cancelled(message).to_info())
                self.run()

    def _derive(self, derived: Variable, done: Sequence[str] = ()) -> None:
        """``done``: texts of the first sources that are there from an earlier try."""
        assert derived.derivation is not None
        if not derived.pending:
            return
        where, limit = _title(derived), self._max_value_bytes
        texts = list(done)
        try:
            size = sum(map(len, texts)) + len(derived.derivation.separator) * (len(texts) - 1)
            for number in range(len(texts) + 1, len(derived.derivation.sources) + 1):
                source = derived.derivation.sources[number - 1]
                here = f"{where}, source {number}"
                texts.append(self._transformer.apply(source.chain, source.variable.value or "", where=here))
                size += len(texts[-1]) + len(derived.derivation.separator)
                if size > limit:
                    raise TransformFailed(f"{here}: the join of {size} characters is above {limit} bytes")
            joined = derived.derivation.separator.join(texts)
            value = self._transformer.apply(derived.derivation.chain, joined, where=where)
            if value is not derived.derivation.sources[0].variable.value:
                self._keep(value, where)
        except Deferred as deferred:
            fail = partial(self._break_pending, derived)
            self._deferred.append(_Delivery(deferred.need, partial(self._derive, derived, texts), fail))
        except (TransformFailed, ValueTooLarge) as error:
            self.break_variable(derived, error.to_info())
        else:
            self.publish(derived, value)

    def _keep(self, text: str, where: str) -> None:
        """Count a text that lives as long as the session, once. Raises :class:`ValueTooLarge`."""
        if text and id(text) not in self._kept:
            self._values.add(text, where=where)
            self._kept[id(text)] = text

    def _end(self, call: Call) -> None:
        was_queued = call.state is QUEUED
        if was_queued or call.next_step < call.num_dispatched:
            self.changes.stopped.append(call)
        errors = [step.output.binding.variable.error for step in call.steps]
        failures = [error for error in errors if error is not None]
        call.state = DONE
        if failures:
            call.error = next((error for error in failures if error.code not in _CANCEL_CODES), failures[0])
            is_cancel = call.error.code in _CANCEL_CODES
            call.state = CANCELLED if is_cancel else FAILED
        self.changes.ended.append(call)


def _is_wanted(variable: Variable) -> bool:
    """Whether somebody waits for it, has asked for it, or will read it."""
    if variable.has_waiters or variable.criteria is not None:
        return True
    if any(derived.pending for derived in variable.derived):
        return True
    return any(
        not call.ended and binding.first_step < call.num_wanted_steps for call, binding in variable.consumers
    )


def _input_failed(call: Call, binding: InputBinding, cause: ErrorInfo) -> ErrorInfo:
    variable = "it" if binding.variable is None else _title(binding.variable)
    message = f"call {call.name} has no value for its input {binding.name!r}: {variable} failed"
    return _upstream(message, cause)


def _title(variable: Variable) -> str:
    """Its id and, since a derived variable's id begins like its source's, what it is derived from."""
    sources = [source.id for source in variable.sources]
    if not sources:
        return f"variable {variable.id}"
    shown = ", ".join(sources[:_MAX_SOURCES_SHOWN]) + (", ..." if len(sources) > _MAX_SOURCES_SHOWN else "")
    return f"variable {variable.id} (derived from {shown})"


def _upstream(message: str, cause: ErrorInfo) -> ErrorInfo:
    """An UpstreamFailed with its causes, outermost first; of a long chain the nearest ones and the root."""
    causes = (ErrorInfo(cause.code, cause.message, cause.param), *cause.causes)
    if len(causes) > _MAX_CAUSES:
        causes = (*causes[: _MAX_CAUSES - 1], causes[-1])
    error: ParrotError = UpstreamFailed(message, causes=causes)
    return error.to_info()
