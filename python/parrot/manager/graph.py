"""The graph of one session: calls and variables as a DAG, built just in time (paper section 4.2).

Events come in (:meth:`Graph.add`, :meth:`Graph.complete`, :meth:`Graph.fail`, ...) and :class:`Changes` go
out; the graph has no clock, does no I/O, and runs in one thread (that of the event loop). Values and ended
calls stay until the session ends: a client may get an intermediate value at any time.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Container, Generator, Iterator
from dataclasses import dataclass

from ..api import Criteria, SubmitBody
from ..config import ManagerConfig
from ..errors import (
    Cancelled,
    DeadlineExceeded,
    DoubleProducer,
    ErrorInfo,
    InternalError,
    ParrotError,
    VariableNotFound,
)
from ..wire import CallId, Objective
from .call import NO_TARGETS, WAITING, Call, OutputBinding, Step, Targets
from .demand import Demand, earliest
from .draft import Draft, Setting, check_value_size, describe_origin, drafting
from .flow import Changes, Flow, Later
from .prefix import prefix_hashes
from .prompt_table import PromptTable
from .recorder import Recorder
from .slices import run_whole
from .tenants import public_id
from .value_bytes import Held, ValueBytes, size_of
from .variable import Consumer, Variable

__all__ = ["Changes", "Graph", "Submitted"]


def _nothing() -> None:
    """Nobody else has a say."""


@dataclass(slots=True)
class Submitted:
    """The calls of one submit in its order, and what inserting them did (some may have failed at once)."""

    calls: list[Call]
    changes: Changes


class Graph:
    """Calls and variables of one session. A method that raises leaves the graph unchanged.

    ``calls`` has ended ones too, in submit order; ``live`` the others, by request id; ``submits`` those of
    each submit that its client named. ``is_stale`` says that objectives must be deduced again
    (:func:`parrot.manager.analysis.deduce`), ``review_us`` when they must without that.
    """

    def __init__(
        self,
        session_id: str,
        *,
        config: ManagerConfig | None = None,
        domain: int = 1,
        call_ids: Iterator[CallId] | None = None,
        hash_key: bytes | None = None,
        prompts: PromptTable | None = None,
        recorder: Recorder | None = None,
        held: Held | None = None,
        may_defer: bool = False,
    ) -> None:
        """``call_ids``, ``hash_key`` and ``prompts``: one each per manager; ``domain`` isolates tenants, and
        ``held`` counts the values of all graphs of one. ``recorder`` is told what it takes to build the graph
        again (:mod:`parrot.manager.recovery`). ``may_defer``: see ``Changes.later``."""
        self.session_id = session_id
        self.domain = domain
        self.calls: dict[CallId, Call] = {}
        self.live: dict[str, Call] = {}
        self.variables: dict[str, Variable] = {}
        self.submits: dict[str, tuple[Call, ...]] = {}
        self.is_stale = False
        self.review_us: int | None = None
        self.next_task_group = 0
        self._expiring: dict[Variable, None] = {}
        self._may_defer = may_defer
        self._deferring: dict[Flow, None] = {}
        self.recorder = recorder
        self._config = config or ManagerConfig()
        self.values = ValueBytes(self._config, held or Held())
        self.setting = Setting(
            session_id,
            domain,
            self._config,
            call_ids or (CallId(number) for number in itertools.count(1)),
            PromptTable() if prompts is None else prompts,
        )
        self._hash_key = hash_key or secrets.token_bytes(16)

    # --- events ---

    def add(self, body: SubmitBody, *, now_us: int) -> Submitted:
        """:meth:`adding` without a pause."""
        return run_whole(self.adding(body, now_us=now_us))

    def adding(
        self, body: SubmitBody, *, now_us: int, before_insertion: Callable[[], None] = _nothing
    ) -> Generator[None, None, Submitted]:
        """Take a submit, whole or not at all; yields while it is checked, and inserts it in one go.
        ``before_insertion`` can still refuse it, by raising.

        Raises :class:`TemplateError`, :class:`UnknownPlaceholder`, :class:`TransformError`,
        :class:`VariableNotFound`, :class:`DoubleProducer`, :class:`CycleError`, :class:`DuplicateRequest`,
        :class:`RequestTooLarge` or :class:`InvalidRequest`.
        """
        draft = yield from drafting(
            body, setting=self.setting, variables=self.variables, live=self.live, now_us=now_us
        )
        before_insertion()
        self.values.check_given(draft.num_value_bytes)
        self.insert(draft, body)
        if self.recorder is not None:
            self.recorder.submitted(body, draft.calls)
        self.is_stale |= draft.reaches_old or any(call.demand for call in draft.calls)
        return Submitted(draft.calls, self._start(draft))

    def set_value(self, var_id: str, value: str) -> Changes:
        """A value from outside. Raises :class:`VariableNotFound`, :class:`DoubleProducer` (it has an origin
        or another value already) or :class:`RequestTooLarge`. The same value again changes nothing: a client
        that lost the answer repeats the request."""
        variable = self.variable(var_id)
        if variable.has_origin:
            is_set = variable.producer is None and variable.derivation is None
            if is_set and variable.value == value:
                return Changes()
            raise DoubleProducer(describe_origin(variable), param=var_id)
        check_value_size(value, f"variable {var_id}", self._config)
        self.values.check_given(size_of(value))
        self.values.count(size_of(value))
        flow = self.new_flow()
        flow.publish(variable, value)
        return self.finish(flow)

    def complete(self, call: Call, step: int, text: str, token_ids: bytes = b"") -> Changes:
        """An engine generated the output of ``step``; ``text`` and ``token_ids`` (wire.pack_ids) are raw.

        The call is in ``ready`` again if that was its last dispatched step and the next one can run. A reply
        for a call that has ended changes nothing.
        """
        if call.ended:
            return Changes()
        if step != call.next_step:
            raise InternalError(f"call {call.name}: output {step} came when {call.next_step} was due")
        flow = self.new_flow()
        binding = call.steps[step].output.binding
        binding.raw, binding.token_ids = text, token_ids
        call.next_step += 1
        if call.next_step >= call.num_dispatched:
            call.state = WAITING
        flow.written(call, step)
        return self.finish(flow, written=call.steps[step])

    def fail(self, call: Call, error: ErrorInfo) -> Changes:
        """The call cannot go on: its outputs that are still pending end with ``error``, and whatever needs
        them with :class:`UpstreamFailed`."""
        if call.ended:
            return Changes()
        flow = self.new_flow()
        flow.break_steps(call, call.next_step, error)
        return self.finish(flow)

    def cancel(self, var_id: str) -> Changes:
        """End a variable as :class:`Cancelled`; one that has ended stays as it is.

        Its consumers fail. Its producer stops unless another of its outputs can still get a value. Further
        up, a variable whose readers are all gone by this is cancelled too, unless somebody waits for it or
        has labelled it.
        """
        variable = self.variable(var_id)
        if not variable.pending:
            return Changes()
        flow = self.new_flow()
        self._drop(flow, variable, Cancelled(f"{variable.name} was cancelled", param=var_id))
        return self.finish(flow)

    def expire(self, now_us: int) -> Changes:
        """End, as if cancelled, the variables for which all who asked gave a deadline that has passed."""
        flow = self.new_flow()
        for variable in list(self._expiring):
            expires_us = None if variable.demand is None else variable.demand.expires_us
            if not variable.pending or expires_us is None:
                del self._expiring[variable]
            elif expires_us <= now_us:
                del self._expiring[variable]
                message = f"{variable.name} was not there by its deadline"
                self._drop(flow, variable, DeadlineExceeded(message, param=variable.id))
        return self.finish(flow)

    def next_time_us(self) -> int | None:
        """When :meth:`expire`, or the deduction, has to look at the graph again."""
        times = [variable.demand.expires_us for variable in self._expiring if variable.demand is not None]
        return earliest(self.review_us, *times)

    def _drop(self, flow: Flow, variable: Variable, error: ParrotError) -> None:
        flow.break_variable(variable, error.to_info())
        flow.run()
        flow.cancel_unread()

    def close(self, error: ErrorInfo) -> Changes:
        """The session ends: so does everything that has not ended, with ``error``."""
        for deferred in self._deferring:
            deferred.give_up()
        flow = self.new_flow()
        for variable in self.variables.values():
            if variable.pending:
                variable.end(None, error)
        for call in self.live.values():
            flow.settle(call)
        return self.finish(flow)

    def releasing(self) -> Generator[None, None, None]:
        """Cut the cycles of a closed graph, so that its calls are freed (:mod:`parrot.garbage`)."""
        self.values.release()
        for variable in self.variables.values():
            variable.producer = variable.derivation = None
            variable.consumers.clear()
            variable.derived.clear()
            yield
        self.submits.clear()
        while self.calls:
            self.calls.popitem()
            yield

    def label(
        self, var_id: str, criteria: Criteria, *, target_ms: float | None = None, now_us: int = 0
    ) -> None:
        """What a get asks of a variable. Of several labels the strictest holds, with all their targets."""
        demand = Demand.of(criteria, target_ms, now_us=now_us)
        if self.ask(self.variable(var_id), demand) and self.recorder is not None:
            self.recorder.labelled(var_id, criteria, target_ms)

    def ask(self, variable: Variable, demand: Demand) -> bool:
        """Whether that is more than what was asked before."""
        if variable.demand is not None:
            demand = variable.demand.merge(demand)
        if demand == variable.demand:
            return False
        variable.demand = demand
        self.is_stale |= variable.pending
        if demand.expires_us is not None and variable.pending:
            self._expiring[variable] = None
        return True

    def variable(self, var_id: str) -> Variable:
        """Raises :class:`VariableNotFound`."""
        variable = self.variables.get(var_id)
        if variable is None:
            where = public_id(self.session_id)
            raise VariableNotFound(f"no variable {var_id!r} in session {where}", param=var_id)
        return variable

    # --- primitives of the paper (figure 8) ---

    def get_producer(self, var_id: str) -> Call | None:
        """GetProducer: the call whose output the variable is; None for one that is set or derived."""
        return self.variable(var_id).producer

    def get_consumers(self, var_id: str) -> tuple[Call, ...]:
        """GetConsumers: the calls that read the variable, through derived variables too, once each."""
        consumers: dict[Call, None] = {}
        seen: set[Variable] = set()
        to_visit = [self.variable(var_id)]
        while to_visit:
            variable = to_visit.pop()
            if variable not in seen:
                seen.add(variable)
                consumers.update(dict.fromkeys(consumer.call for consumer in variable.consumers))
                to_visit.extend(reversed(variable.derived))
        return tuple(consumers)

    def prefix_hash(self, call: Call, boundary: int) -> bytes:
        """PrefixHash: 16 bytes for model, domain and the first ``boundary`` of ``call.parts``, which runs
        from 0 to ``len(call.parts)``; see :func:`parrot.manager.prefix.prefix_hashes`."""
        return prefix_hashes(call, key=self._hash_key, default_model=self._config.model)[boundary]

    def get_perf_obj(self, var_id: str) -> Criteria | None:
        """GetPerfObj: the label of a variable, or else what was deduced for its producer."""
        variable = self.variable(var_id)
        if variable.criteria is None and variable.producer is not None:
            return variable.producer.objective
        return variable.criteria

    def set_objective(
        self,
        call: Call,
        objective: Objective,
        *,
        task_group: int | None = None,
        depth: int | None = None,
        targets: Targets = NO_TARGETS,
    ) -> bool:
        """Set what was deduced for a call; True if that changes anything."""
        new = (objective, task_group, depth, targets)
        changed = new != (call.objective, call.task_group, call.depth, call.targets)
        call.objective, call.task_group, call.depth, call.targets = new
        return changed

    # --- insertion ---

    def insert(self, draft: Draft, body: SubmitBody) -> None:
        """Take in a checked draft and its labels; nothing is delivered yet."""
        self._attach(draft)
        self.values.count(draft.num_value_bytes)
        if body.submit_id is not None:
            self.submits[body.submit_id] = tuple(draft.calls)
        for variable, demand in draft.demands.items():
            self.ask(variable, demand)
        for call in draft.calls:
            if call.demand is not None and call.demand.expires_us is not None:
                for binding in call.outputs.values():
                    self.ask(binding.variable, call.demand)

    def _attach(self, draft: Draft) -> None:
        """Join calls and variables."""
        self.variables.update(draft.variables)
        for variable, (call, step) in draft.producers.items():
            variable.producer, variable.producer_step = call, step
        for variable, derivation in draft.derivations.items():
            variable.derivation = derivation
            variable.num_missing_sources = len(derivation.sources)
            for source in derivation.sources:
                source.variable.derived.append(variable)
        for call in draft.calls:
            self.calls[call.call_id] = call
            self.live[call.request_id] = call
            for binding in call.inputs.values():
                call.steps[binding.first_step].num_missing += binding.text is None
                if binding.variable is not None:
                    binding.variable.consumers.append(Consumer(call, binding))

    def _start(self, draft: Draft) -> Changes:
        """Deliver what exists: constants, values of earlier submits, then those of this one."""
        flow = self.new_flow()
        run_whole(flow.delivering_existing(draft.calls, draft.derivations))
        for variable, value in draft.values.items():
            flow.publish(variable, value)
        flow.run()
        for call in draft.calls:
            flow.wake(call)
        return self.finish(flow, given=draft.values)

    def _needed(self, step: Step) -> OutputBinding | None:
        """The output of a step if more of it is needed than its variable's value."""
        output = step.output.binding
        producer = output.variable.producer
        goes_on = producer is not None and not producer.ended  # or its transforms are still to come
        return output if goes_on or output.logprobs is not None else None

    def new_flow(self) -> Flow:
        """For one event; :meth:`finish` takes what it did."""
        return Flow(self._config.max_value_bytes, self.values, may_defer=self._may_defer)

    def finish(self, flow: Flow, *, given: Container[Variable] = (), written: Step | None = None) -> Changes:
        """``given``: variables whose values the submit on record has; ``written``: what an engine wrote."""
        changes = flow.run()
        self._deferring.pop(flow, None)
        if flow.is_deferred:
            self._deferring[flow] = None
            changes.later = Later(self.domain, self.session_id, flow, self.finish)
        if self.recorder is not None:
            ended = [variable for variable in changes.variables if variable not in given]
            self.recorder.ended(ended, None if written is None else self._needed(written))
        for call in changes.ended:
            self.live.pop(call.request_id, None)
        return changes
