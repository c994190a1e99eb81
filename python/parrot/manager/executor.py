"""The event-driven centre of the manager: graph changes and engine replies in, frames out.

There is no polling: a call is dispatched in the turn of the loop in which its last input came to exist.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import deque
from collections.abc import Generator

from .. import wire
from ..api import CallBody, SubmitBody
from ..config import ManagerConfig
from ..errors import ErrorInfo, Overloaded, SessionClosed, Unavailable
from ..tokenizer import EncodedPrompt, Tokenizer
from .application import Application
from .call import DONE, QUEUED, Call
from .call_counts import CallCounts
from .clock import now_s, now_us
from .deferrals import Deferrals
from .dispatcher import Dispatcher
from .early_fill import EarlyFills
from .engines import Engine, EngineRegistry
from .graph import Changes, Graph
from .history import History
from .key_file import KeyFile
from .knowledge import PrefixKnowledge
from .objectives import Objectives
from .pace import Pace
from .prompts import PromptBuilder
from .published import PublishedTemplates
from .replies import ReplyHandler
from .scheduler_bridge import SchedulerBridge
from .session import Session
from .single import SingleCall
from .slices import run_in_slices, run_whole
from .tenants import Tenants
from .uses import ContextUses
from .watchdog import Watchdog

log = logging.getLogger(__name__)
_AT_ONCE = 256  # calls that are recorded or freed, a millisecond
_REPLIES_S = 0.0005  # of handling replies, some ten of them, before what they made ready is sent


class Executor:
    """Implements :class:`~parrot.manager.engines.EngineEvents` and
    :class:`~parrot.manager.dispatcher.CallOwner`. Lives on the loop, in one thread."""

    def __init__(
        self,
        config: ManagerConfig,
        tokenizer: Tokenizer,
        registry: EngineRegistry,
        keys: KeyFile | None = None,
    ) -> None:
        self.config = config
        self.prompts = PromptBuilder(tokenizer, PublishedTemplates.load(config.published_templates))
        self.history = History()
        self.refusal: str | None = None  # why no work is taken any more
        self.refusal_type: type[Unavailable] = Unavailable
        self._no_engine: str | None = None  # why none will come
        self._tokenizer = tokenizer
        self._registry = registry
        self.background = registry.background
        self.scheduler = SchedulerBridge(config.scheduler)
        self.tenants = Tenants(keys, self.scheduler.set_tenant_weight)
        self.dispatcher = Dispatcher(
            self.prompts, registry, self.scheduler, self, max_retries=config.max_retries
        )
        self.watchdog = Watchdog(config, self.dispatcher, registry)
        self._applications: dict[str, Application] = {}
        self._numbers = itertools.count(1)
        self._uses = ContextUses(self.prompts) if config.graph_eviction else None
        self.knowledge = PrefixKnowledge(registry, self.scheduler, self._uses)
        self.early = EarlyFills(
            config.early_fill, self.prompts, self.knowledge, self.dispatcher, self.application
        )
        self._objectives = Objectives(self, self.dispatcher.update_objective)
        self.replies = ReplyHandler(
            self.dispatcher, self.knowledge, self.early, apply=self.apply, fail=self.call_failed
        )
        self.deferrals = Deferrals(self.background, apply=self.apply, turn=self.turn)
        self._releasing: set[asyncio.Task[None]] = set()
        self._turn_is_due = False
        self._members: list[Call] | None = None  # of task groups, ready in the frame that is being handled
        self._ended: deque[tuple[Call, str]] = deque()  # and not recorded yet, with their tenants
        self.num_live = 0
        self.counts = CallCounts()

    # --- applications ---

    def open(self, session: Session, single: SingleCall | None = None) -> Application:
        """From now on calls of this session are run."""
        tenant = self.tenants.get(session.tenant)
        application = Application(next(self._numbers), session, tenant, now_us(), single)
        self._applications[session.session_id] = application
        return application

    def restoring(self, session: Session, changes: Changes) -> Generator[None, None, None]:
        """Run the calls of a session on from where its graph resumed; a :meth:`turn` must follow."""
        application = self.open(session)
        live = list(session.graph.live.values())
        application.arrival_us = min((c.timing.submitted_us for c in live), default=application.arrival_us)
        num_live = len(live) + len(changes.ended)  # those that end now end as others do
        self.num_live += num_live
        application.tenant.submitted(num_live)
        self._objectives.mark(application)
        if self._uses is not None:
            for call in live:
                self._uses.submitted(call)
                yield
        self.early.submitted(live)
        self.apply(changes)

    def add(
        self, application: Application, body: SubmitBody, fill: EncodedPrompt | None = None
    ) -> list[Call]:
        """:meth:`adding` without a pause. ``fill``: a single call's ids."""
        return run_whole(self.adding(application, body, fill))

    def adding(
        self, application: Application, body: SubmitBody, fill: EncodedPrompt | None = None
    ) -> Generator[None, None, list[Call]]:
        """Add calls to an application's graph and start those that can run; yields while that goes on."""
        session, now = application.session, now_us()
        was_idle, num_ready = True, sum(map(_is_ready, body.calls))

        def before_insertion() -> None:
            nonlocal was_idle
            if application.closed:
                raise SessionClosed("the session ended while a submit for it was taken")
            self.check_open(len(body.calls), num_ready=num_ready)
            application.tenant.check_calls(len(body.calls))
            was_idle = not session.graph.live

        submitted = yield from session.graph.adding(body, now_us=now, before_insertion=before_insertion)
        if was_idle:
            application.arrives(now)
        self.num_live += len(submitted.calls)
        application.tenant.submitted(len(submitted.calls))
        self._objectives.mark(application)
        if fill is not None and application.single is not None:
            application.single.attach(submitted.calls[0])
            self.dispatcher.preset(submitted.calls[0], fill)
        elif self._uses is not None:
            self.apply(Changes(ended=submitted.changes.ended))  # before the session may be deleted meanwhile
            submitted.changes.ended = []
            for call in submitted.calls:
                if not (call.ended or application.closed):
                    self._uses.submitted(call)
                yield
        if not application.closed:
            self.early.submitted(submitted.calls)
            self.apply(submitted.changes)
            self.turn()
        yield
        return submitted.calls

    def relabel(self, application: Application) -> None:
        """A label has come; objectives are deduced in the coming turn."""
        self._objectives.mark(application)
        if not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self.turn)

    def application_of(self, session: Session) -> Application:
        """The application that :meth:`open` made."""
        return self._applications[session.session_id]

    def close(self, session: Session, error: ErrorInfo) -> None:
        """What is pending ends with ``error``: calls stop, contexts are freed."""
        changes = session.graph.close(error)
        self.apply(changes)
        for call in changes.ended:
            self.early.ended(call)  # before the contexts of its session go
        application = self._applications.pop(session.session_id)
        if changes.stopped and application.single is None:
            num_stopped = len(changes.stopped)
            log.info("session %s ends, %d calls stop: %s", session.session_id, num_stopped, error.message)
        application.closed = True
        application.review_at(None)
        self._objectives.closed(application)
        self.knowledge.closed(session.session_id)
        self.turn()
        self._release(session.graph)

    def _release(self, graph: Graph) -> None:
        """Free a closed graph, a large one in slices."""
        if len(graph.calls) <= _AT_ONCE:
            run_whole(graph.releasing())
        else:
            task = asyncio.get_running_loop().create_task(run_in_slices(graph.releasing()))
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    def is_open(self, session: Session) -> bool:
        """Whether :meth:`close` is still to come."""
        return session.session_id in self._applications

    def close_all(self, error: ErrorInfo) -> None:
        """Close every session."""
        for application in list(self._applications.values()):
            self.close(application.session, error)

    def check_open(self, num_calls: int = 0, *, num_ready: int = 0) -> None:
        """Raise :class:`Unavailable` or :class:`Overloaded` if so many calls cannot be taken now, of which
        ``num_ready`` will wait for an engine at once."""
        if self.refusal is not None:
            raise self.refusal_type(self.refusal)
        if num_calls and self._no_engine is not None:
            raise Unavailable(self._no_engine)
        room = self.config.scheduler.max_queued
        if num_ready > room - self.dispatcher.num_queued:
            raise Overloaded(
                f"{self.dispatcher.num_queued} calls wait for an engine, {num_ready} more would exceed "
                f"max_queued = {room}; try again later, or with fewer calls at once"
            )
        limit = self.config.max_queued_calls
        if self.num_live + num_calls > limit:
            raise Overloaded(
                f"{self.num_live} calls are unfinished, {num_calls} more would exceed the limit of {limit}; "
                "try again later, or with fewer calls at once"
            )

    def apply(self, changes: Changes) -> None:
        """Carry out what an event did to a graph; a :meth:`turn` must follow."""
        now = now_us()
        if changes.ended and not self._ended and self._members is None:  # else a turn of mine follows
            asyncio.get_running_loop().call_soon(self._record_rest)  # if none comes first
        for call in changes.ended:
            self.dispatcher.stop(call)
            if call.state is not DONE or call.timing.finished_us is None:
                call.timing.finished_us = now
            self.num_live -= 1
            application = self._applications[call.session_id]
            application.tenant.ended(call)
            if application.single is not None:
                application.single.ended()
            self._ended.append((call, application.tenant.name))
        for call in changes.ready:
            if call.timing.ready_us is None:
                call.timing.ready_us = now
            if self._members is not None and call.task_group is not None:
                self._members.append(call)
            else:
                self.dispatcher.enqueue(call)
        if changes.later is not None:
            self.deferrals.start(changes.later)

    def turn(self) -> None:
        """Deduce objectives, then encode, place and send what is ready; what can wait comes after that."""
        self._turn_is_due = False
        self._dispatch()
        replies, knowledge = self.replies, self.knowledge
        for rest in (replies.keep_contexts, self._record_rest, knowledge.tell_uses, self.early.turn):
            rest()
            # A thread that the dispatch woke, of an engine here, may wait for this very processor.
            os.sched_yield()

    def _dispatch(self) -> None:
        self._objectives.turn()
        self.dispatcher.turn()
        self._registry.flush()

    def _record_rest(self) -> None:
        for _ in range(min(len(self._ended), _AT_ONCE)):
            call, tenant = self._ended.popleft()
            self.early.ended(call)
            self.counts.ended(call)
            self.history.add(tenant, call)
            if self._uses is not None:
                self._uses.ended(call)
        if self._ended:
            asyncio.get_running_loop().call_soon(self._record_rest)

    def _set_pace(self) -> None:
        costs = [engine.cost for engine in self._registry.alive]
        self._objectives.pace = Pace.of(costs, kv_tokens=self.config.scheduler.latency_capacity_tokens)

    async def drain(self, grace_s: float) -> None:
        """Take no more work, and give what is ready or running ``grace_s`` to finish."""
        self.refusal = "the service is shutting down"
        until = now_s() + grace_s
        while await self.dispatcher.wait_idle(until - now_s()):
            if not self.deferrals.num_pending or now_s() >= until:
                return
            await self.deferrals.wait(until - now_s())  # which may make calls ready
        log.warning("%d calls did not finish within %g s", self.dispatcher.num_busy, grace_s)

    # --- CallOwner ---

    def application(self, call: Call) -> Application:
        """See :class:`~parrot.manager.dispatcher.CallOwner`."""
        return self._applications[call.session_id]

    def call_failed(self, call: Call, error: ErrorInfo) -> None:
        """See :class:`~parrot.manager.dispatcher.CallOwner`."""
        log.info("call %s failed: %s", call.request_id, error.code)
        self.apply(self._applications[call.session_id].session.graph.fail(call, error))

    def call_dispatched(self, call: Call) -> None:
        """See :class:`~parrot.manager.dispatcher.CallOwner`."""
        self.early.dispatched(call)

    def call_restarts(self, call: Call) -> None:
        """See :class:`~parrot.manager.dispatcher.CallOwner`."""
        single = self._applications[call.session_id].single
        if single is not None:
            single.restarted()

    # --- EngineEvents ---

    def admits_engine(self, registration: wire.Register) -> str | None:
        """See :class:`~parrot.manager.engines.EngineEvents`."""
        if registration.model.fingerprint != self._tokenizer.fingerprint:
            return f"its model {registration.model.name} tokenises differently from {self.config.model}"
        return None

    def engine_joined(self, engine: Engine) -> None:
        """See :class:`~parrot.manager.engines.EngineEvents`."""
        self.scheduler.add_engine(engine)  # which may refuse it, before anything else has it
        self._no_engine = None
        self.knowledge.engine_joined(engine)
        self._set_pace()
        self.dispatcher.engine_joined()
        asyncio.get_running_loop().call_soon(self.turn)  # what goes wrong there is not the engine's fault

    def engine_lost(self, engine: Engine, reason: str) -> None:
        """See :class:`~parrot.manager.engines.EngineEvents`."""
        log.info("%d calls were with engine %s (%s)", engine.num_dispatched, engine.name, reason)
        self.early.engine_lost(engine)
        self.knowledge.engine_lost(engine)
        calls = self.dispatcher.engine_lost(engine, reason)
        if engine.state == "stalled":
            self.watchdog.engine_stalled(engine, reason, calls)
        self.early.turn()

    def engine_paused(self, engine: Engine, paused: bool) -> None:
        """See :class:`~parrot.manager.engines.EngineEvents`."""
        self.scheduler.pause(engine, paused)
        self.turn()

    def engine_slowed(self, engine: Engine, slowdown: float) -> None:
        """See :class:`~parrot.manager.engines.EngineEvents`."""
        self.scheduler.set_slowdown(engine, slowdown)

    def engine_repriced(self, engine: Engine) -> None:
        """See :class:`~parrot.manager.engines.EngineEvents`."""
        self.scheduler.set_cost(engine)
        self._set_pace()

    def frames_lost(self, engine: Engine) -> None:
        """See :class:`~parrot.manager.engines.EngineEvents`."""
        self.early.frames_lost(engine)
        self.dispatcher.frames_lost(engine)

    def heartbeat(self) -> None:
        """See :class:`~parrot.manager.engines.EngineEvents`."""
        self.watchdog.look()
        self.knowledge.tell_uses()  # what waited for a later turn, if none came

    def engines_do_not_start(self, reason: str) -> None:
        """No engine is there and starting one fails: what waits for one ends with :class:`Unavailable`, and
        so do new calls until one joins."""
        if self._registry.alive:
            return
        self._no_engine, error = reason, Unavailable(reason).to_info()
        for application in list(self._applications.values()):
            for call in list(application.session.graph.live.values()):
                if call.state is QUEUED:
                    self.call_failed(call, error)
        self.turn()

    def engine_replied(self, engine: Engine, replies: tuple[wire.Reply, ...]) -> None:
        """See :class:`~parrot.manager.engines.EngineEvents`."""
        began = now_s()
        members = self._members = []
        try:
            for _ in self.replies.handling(engine, replies):
                # Consumers of the first calls need not wait for the rest; members of a task group do.
                if now_s() - began > _REPLIES_S:
                    self._dispatch()
                    began = now_s()
        finally:
            self._members = None
            for call in members:
                self.dispatcher.enqueue(call)
        self.turn()


def _is_ready(call: CallBody) -> bool:
    """Whether the call needs nothing that is not in its body."""
    return all(hole.kind == "output" or hole.semantic_var_id is None for hole in call.placeholders)
