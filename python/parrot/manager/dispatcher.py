"""From a ready call to a frame on the wire: encode, check the length, queue, place, dispatch.

Everything happens in *turns* on the event loop. A turn encodes what became ready for at most a few
milliseconds, lets the scheduler place it, and sends; what is left waits for the next turn, so that requests
and heartbeats are answered in between. Long texts are encoded in a thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

from .. import wire
from ..errors import EngineLost, ErrorInfo, InternalError, ParrotError
from ..tokenizer import EncodedPrompt, Piece
from .application import Application
from .call import MAX_FREE_RESTARTS, QUEUED, Call, Step
from .clock import now_s, now_us
from .engines import Engine, EngineRegistry
from .prompts import CallPrompt, Limits, PromptBuilder, assemble, num_chars
from .runs import Run, num_new_tokens
from .scheduler_bridge import SchedulerBridge
from .slices import SLICE_S

log = logging.getLogger(__name__)
_MAX_HOLD_S = 0.02  # calls made together are placed together, if encoding them takes no longer
THREAD_CHARS = 16 * 1024


class CallOwner(Protocol):
    """What the dispatcher asks of the executor."""

    def application(self, call: Call) -> Application:
        """The call's application."""

    def call_failed(self, call: Call, error: ErrorInfo) -> None:
        """The call cannot run. The owner will :meth:`Dispatcher.stop` whatever that ends."""

    def call_dispatched(self, call: Call) -> None:
        """The call is with an engine."""

    def call_restarts(self, call: Call) -> None:
        """Its engine is lost; the call runs again."""


class Dispatcher:
    """Queue and runs of all calls. Used on the loop only."""

    def __init__(
        self,
        builder: PromptBuilder,
        registry: EngineRegistry,
        bridge: SchedulerBridge,
        owner: CallOwner,
        *,
        max_retries: int,
    ) -> None:
        self._builder = builder
        self._registry = registry
        self._bridge = bridge
        self._owner = owner
        self._max_retries = max_retries
        self._ids = itertools.count(1)
        self.limits: Limits | None = None  # of the engines seen so far
        self._to_encode: deque[Call] = deque()
        self._unsized: dict[Call, None] = {}  # ready before any engine had said what it can hold
        self._encoding: dict[Call, asyncio.Task[None]] = {}
        self._prompts: dict[Call, CallPrompt] = {}
        self._losses: dict[Call, list[ErrorInfo]] = {}
        self.num_retries = 0
        self._runs: dict[wire.CallId, Run] = {}
        self._open: dict[Call, Run] = {}  # the run that still owes outputs
        self._placed: deque[tuple[Run, wire.ContextId]] = deque()  # not sent yet; with the parent context
        self._aborts: dict[Engine, list[Run]] = defaultdict(list)
        self._held_since: float | None = None
        self._turn_is_due = False
        self._idle = asyncio.Event()

    def new_id(self) -> int:
        """For a run and its context; none is ever used again."""
        return next(self._ids)

    # --- calls ---

    def enqueue(self, call: Call) -> None:
        """The call's next steps are ready; it is dispatched in the coming turn."""
        self._to_encode.append(call)

    def preset(self, call: Call, fill: EncodedPrompt) -> None:
        """The ids of the call's first step are known already."""
        self._prompts[call] = CallPrompt([fill])

    def stop(self, call: Call) -> None:
        """The call ended: out of the queue, and off its engine within one step."""
        self._prompts.pop(call, None)
        self._losses.pop(call, None)
        self._unsized.pop(call, None)
        encoding = self._encoding.pop(call, None)
        if encoding is not None:
            encoding.cancel()
        run = self._open.pop(call, None)
        if run is None:
            return
        self._drop(run)
        if run.engine is not None:
            self._aborts[run.engine].append(run)

    def update_objective(self, call: Call) -> None:
        """The call's label changed."""
        run = self._open.get(call)
        if run is not None:
            self._bridge.update_objective(run)

    # --- runs ---

    def run(self, run_id: wire.CallId, engine: Engine) -> Run | None:
        """The run of this id if this engine has it; None for one that was stopped or lost."""
        run = self._runs.get(run_id)
        return run if run is not None and run.engine is engine else None

    def settle(self, run: Run) -> None:
        """The run owes no more outputs: its call may be queued again while the engine cleans up."""
        if self._open.get(run.call) is run:
            del self._open[run.call]

    def finish(self, run: Run, num_tokens: int) -> None:
        """The run left its engine; its context stays there."""
        self.settle(run)
        self._bridge.finish(run, num_tokens)
        self._forget(run)

    def fail(self, run: Run) -> None:
        """The run left its engine with an error."""
        self.settle(run)
        self._drop(run)

    def _drop(self, run: Run) -> None:
        self._bridge.cancel(run)
        self._forget(run)

    def _forget(self, run: Run) -> None:
        del self._runs[run.run_id]
        run.left()

    def breached(self, run: Run, engine: Engine, reason: str) -> None:
        """The engine's replies about a run cannot be right: it counts as lost there, and runs again on
        another engine if one is usable."""
        is_open = self._open.get(run.call) is run
        self.fail(run)
        self._aborts[engine].append(run)
        if not is_open:
            return
        self._run_again(run, engine, reason)
        if any(other is not engine for other in self._registry.usable):
            self._bridge.pause(engine, True)
            try:
                self.turn()
            finally:
                self._bridge.pause(engine, engine.state != "ready")

    # --- engines ---

    def engine_joined(self) -> None:
        """The scheduler has one more engine; a :meth:`turn` must follow."""
        self.limits = Limits.of([one.registration for one in self._registry.alive])
        self._to_encode.extend(self._unsized)
        self._unsized.clear()

    def engine_lost(self, engine: Engine, reason: str) -> list[Call]:
        """Its calls, which are returned, run again from their variables until their retries are used up."""
        self._aborts.pop(engine, None)
        lost: list[Run] = []
        for run_id in self._bridge.remove_engine(engine):
            run = self._runs.pop(run_id)
            run.left()
            if self._open.get(run.call) is run:
                del self._open[run.call]
                lost.append(run)
        for run in lost:
            self._run_again(run, engine, reason)
        alive = self._registry.alive
        if alive:
            self.limits = Limits.of([one.registration for one in alive])
        self.turn()
        return [run.call for run in lost]

    def _run_again(self, run: Run, engine: Engine, reason: str) -> None:
        call, was_sent = run.call, bool(run.steps)
        if call.ended:
            return  # it needed a call that has used up its retries
        losses = self._losses.setdefault(call, [])
        if was_sent:
            losses.append(EngineLost(f"engine {engine.name}: {reason}").to_info())
        if len(losses) > self._max_retries:
            message = f"call {call.name}: lost with engine {engine.name}, for the {len(losses)}. time"
            self._owner.call_failed(call, EngineLost(message, causes=tuple(reversed(losses))).to_info())
            return
        self._restart(call)

    def _restart(self, call: Call) -> None:
        self.num_retries += 1
        call.requeue()
        self._owner.call_restarts(call)
        self._to_encode.append(call)

    def frames_lost(self, engine: Engine) -> None:
        """Messages to or from the engine did not arrive: whatever it has runs again, there or elsewhere. That
        is not held against the calls, which did not bring it about, unless it happens again and again."""
        sent = [run for run in self._runs.values() if run.engine is engine and run.steps]
        lost = [run for run in sent if self._open.get(run.call) is run]
        for run in sent:
            self.fail(run)
            self._aborts[engine].append(run)
        for run in lost:
            if run.call.num_free_restarts >= MAX_FREE_RESTARTS:
                self._run_again(run, engine, "its frames were lost")
            elif not run.call.ended:
                run.call.num_free_restarts += 1
                self._restart(run.call)
        self.turn()

    # --- turns ---

    def turn(self) -> None:
        """Encode what is ready, place it, send it."""
        started = now_s()
        self._send_placed(started)
        while self._to_encode and now_s() - started < SLICE_S:
            self._encode(self._to_encode.popleft())
        if self._to_encode and self._held_since is None:
            self._held_since = started
        if not self._to_encode or started - (self._held_since or started) > _MAX_HOLD_S:
            self._place()
            self._held_since = None
            self._send_placed(started)
        self._send_aborts()
        if (self._to_encode or self._placed) and not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self.num_busy == 0:
            self._idle.set()

    def _next_turn(self) -> None:
        self._turn_is_due = False
        self.turn()

    @property
    def num_queued(self) -> int:
        """Calls that wait for an engine."""
        return self._bridge.num_queued

    @property
    def runs(self) -> list[Run]:
        """Those that wait for an engine, and those that have one."""
        return list(self._runs.values())

    @property
    def num_busy(self) -> int:
        """Calls that are ready or running."""
        return len(self._to_encode) + len(self._unsized) + len(self._encoding) + len(self._runs)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call is ready or running; False if ``timeout_s`` passed first."""
        self._idle.clear()
        if self.num_busy == 0:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _encode(self, call: Call) -> None:
        if call.state is not QUEUED or call in self._open or call in self._encoding:
            return
        if self.limits is None:
            self._unsized[call] = None
            return
        try:
            steps = call.ready_steps()
            if not steps:
                return
            prompt = self._prompts.setdefault(call, CallPrompt())
            missing = call.steps[len(prompt.fills) : steps[-1].index + 1]
            if missing and not self._encode_steps(call, prompt, missing, self.limits):
                return
            self._queue(call, prompt, steps, self.limits)
        except ParrotError as error:
            self._owner.call_failed(call, error.to_info())
        except Exception as error:
            self._bug(call, error)

    def _encode_steps(self, call: Call, prompt: CallPrompt, missing: Sequence[Step], limits: Limits) -> bool:
        """Encode now and return True, or start a thread that puts the call into the queue again."""
        pieces = self._builder.step_pieces(call, missing)
        first_step = len(prompt.fills)
        size = num_chars(pieces)
        self._builder.refuse_hopeless(size, limits, call.function)
        # A long constant that other prompts had is known; a thread would only delay it.
        if size > THREAD_CHARS:
            size = self._builder.num_new_chars(pieces, first_step=first_step, domain=call.domain)
        if size > THREAD_CHARS:
            task = asyncio.create_task(self._encode_in_thread(call, prompt, pieces))
            self._encoding[call] = task
            return False
        prompt.fills += self._builder.encode(pieces, first_step=first_step, domain=call.domain)
        return True

    async def _encode_in_thread(self, call: Call, prompt: CallPrompt, pieces: list[list[Piece]]) -> None:
        try:
            fills = await asyncio.to_thread(
                self._builder.encode, pieces, first_step=len(prompt.fills), domain=call.domain
            )
        except Exception as error:
            del self._encoding[call]
            if isinstance(error, ParrotError):
                self._owner.call_failed(call, error.to_info())
            else:
                self._bug(call, error)
        else:
            del self._encoding[call]
            prompt.fills += fills
            self._to_encode.append(call)
        self.turn()

    def _bug(self, call: Call, error: Exception) -> None:
        log.error("call %s could not be prepared", call.name, exc_info=error)
        message = f"call {call.name}: {type(error).__name__} in the service; its log has the trace"
        self._owner.call_failed(call, InternalError(message).to_info())

    def _queue(self, call: Call, prompt: CallPrompt, steps: Sequence[Step], limits: Limits) -> None:
        run_prompt = assemble(prompt, call, steps)
        limits.check(run_prompt.num_tokens, num_new_tokens(steps), call.function)
        number = self.new_id()
        application = self._owner.application(call)
        run = Run(wire.CallId(number), wire.ContextId(number), call, application, run_prompt)
        self._bridge.submit(run, len(steps))
        self._runs[run.run_id] = run
        self._open[call] = run

    def _place(self) -> None:
        if self._bridge.num_queued == 0:
            return
        for placement in self._bridge.schedule():
            run = self._runs.get(wire.CallId(placement.call_id))
            engine = self._registry.get(placement.engine_id)
            if run is None or engine is None:
                continue
            # Now, not when it is sent: scheduler and registry always say the same of an engine's load.
            run.placed(engine)
            self._placed.append((run, wire.ContextId(placement.parent_context_id)))

    def _send_placed(self, started: float) -> None:
        while self._placed and now_s() - started < SLICE_S:
            run, parent = self._placed.popleft()
            if self._runs.get(run.run_id) is not run or run.engine is None:
                continue  # stopped, or its engine was lost
            try:
                self._dispatch(run, run.engine, parent)
            except ParrotError as error:
                self._owner.call_failed(run.call, error.to_info())
            except Exception as error:
                self._bug(run.call, error)

    def _dispatch(self, run: Run, engine: Engine, parent: wire.ContextId) -> None:
        call = run.call
        steps = call.dispatch(engine.name, self._match_steps(run))
        now = now_us()
        if call.timing.dispatched_us is None or call.next_step == 0:
            call.timing.dispatched_us = now
        run.sent(now)
        call.prompt_tokens = sum(len(fill.token_ids) for fill in self._prompts[call].fills)
        frame = run.dispatch(steps, parent)
        # A send that fails makes the registry report the engine as lost, which queues the call again.
        self._registry.send(engine, frame)
        self._owner.call_dispatched(call)

    def _match_steps(self, run: Run) -> tuple[Step, ...]:
        """Values that came, and outputs that were cancelled, while the run was queued change its steps."""
        call, steps = run.call, run.call.ready_steps()
        if len(steps) == len(run.prompt.later) + 1 or self.limits is None:
            return steps
        prompt = self._prompts[call]
        missing = call.steps[len(prompt.fills) : steps[-1].index + 1]
        if missing:
            pieces = self._builder.step_pieces(call, missing)
            prompt.fills += self._builder.encode(pieces, first_step=len(prompt.fills), domain=call.domain)
        run.prompt = assemble(prompt, call, steps)
        self.limits.check(run.prompt.num_tokens, num_new_tokens(steps), call.function)
        return steps

    def _send_aborts(self) -> None:
        for engine, runs in self._aborts.items():
            self._registry.send(engine, wire.Abort(tuple(run.run_id for run in runs)))
            self._registry.send(engine, wire.FreeContexts(tuple(run.context_id for run in runs)))
        self._aborts.clear()
