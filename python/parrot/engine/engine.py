"""The engine's step loop without sockets: calls go in, replies come out (paper sections 5.3 and 7).

A step admits waiting calls, builds a batch of decodes and prefill chunks, runs the model, samples, commits
the KV and replies. Calls are scheduled step by step; one that loses its blocks is computed again.
"""

from __future__ import annotations

import gc
import logging
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from .._core import ContextTree, OutOfBlocks
from ..errors import DuplicateRequest, EngineError, InvalidRequest, ParrotError
from ..tokenizer.segments import Piece, PromptEncoder
from ..tokenizer.tokenizer import Tokenizer
from ..wire import (
    CallDone,
    CallFailed,
    CallId,
    Chunk,
    ContextId,
    CostModel,
    Dispatch,
    EngineStats,
    FinishReason,
    Ids,
    Reply,
    StepCost,
    max_cached_contexts,
)
from .admission import WaitingQueue, check_fits, num_blocks_for, remove_in_order, too_long
from .batch import BLOCK_SIZE
from .cache import CachedContexts
from .call import EngineCall, Output, engine_error
from .compiling import CompileQueue
from .cost_model import expected_us
from .early_fill import EarlyFills
from .grammar import Grammars
from .live_cost import LiveCost
from .next_ids import NextIds
from .pool_guard import PoolGuard
from .runner import Reservation, Runner, Work, choose_work, reserve
from .stats import Counters, collect, now_us
from .uses import PendingUses

log = logging.getLogger(__name__)


class Engine:
    """Runs calls on one model. Not thread-safe: one thread submits, aborts and steps."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        clock: Callable[[], int] = now_us,
        cost_model: CostModel | None = None,
        live_cost: LiveCost | None = None,
    ) -> None:
        self.counters = Counters()
        self.tree = ContextTree(runner.num_blocks, BLOCK_SIZE)
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos_ids = tokenizer.ends_below(runner.vocab_size)
        self._encoder = PromptEncoder(tokenizer, cache_bytes=0)  # calls of many tenants use it
        self.max_batch_size, self.max_batch_tokens = max_batch_size, max_batch_tokens
        self._clock = clock  # microseconds
        self._cost_model = cost_model  # what steps are compared with
        self._live_cost = live_cost  # which keeps it fresh
        self._pool_guard = PoolGuard(clock)
        grammars = Grammars(tokenizer, runner.vocab_size)
        self._compiling = CompileQueue(grammars)
        self._next_ids = NextIds(runner, grammars)
        self._waiting = WaitingQueue(self.tree)
        self._running: list[EngineCall] = []  # in order of application arrival
        self._live: dict[CallId, EngineCall] = {}
        self._live_contexts: set[ContextId] = set()  # theirs
        self._has_failed = False  # this step
        self._cached = CachedContexts(self.tree, max_cached_contexts(runner.num_blocks))
        self._early = EarlyFills(self.tree, self._cached, max_batch_tokens, cost_model)
        self._replies: list[Reply] = []
        self._report_is_due = False
        self.uses = PendingUses()  # taken into account by the next step

    # --- between steps -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """A step would do something or has replies to hand out."""
        return bool(self._live or self._replies or self._report_is_due)

    def submit(self, dispatch: Dispatch) -> None:
        """Queue a call. One that can never run is answered with CallFailed by the next step.

        Raises :class:`DuplicateRequest` if a call of this id is here already.
        """
        if dispatch.call_id in self._live:
            raise DuplicateRequest(f"call {dispatch.call_id} is here already", param="call_id")
        try:
            call = EngineCall(dispatch, self._clock())
            self._check_new(call)
            call.check(self._runner.vocab_size)
            check_fits(call, self._runner.max_positions, self._runner.num_blocks)
            self._live[call.call_id] = call
            self._live_contexts.add(call.context_id)
            if dispatch.early_fill:
                call.advance(self._tokenizer.decode)
                self._early.add(call)
            elif not self._compiling.add(call):
                self._enter(call)
        except ParrotError as error:
            refused = self._live.pop(dispatch.call_id, None)
            if refused is not None:
                self._live_contexts.remove(refused.context_id)
            self._replies.append(CallFailed(dispatch.call_id, error.to_info()))

    def _enter(self, call: EngineCall) -> None:
        """The call can run as soon as there is room."""
        self.free_contexts(call.advance(self._tokenizer.decode, self._eos_ids))
        call.check_not_empty()
        self._waiting.add(call)

    def abort(self, call_ids: Iterable[CallId]) -> None:
        """Drop calls and their contexts; unknown ids are ignored and nothing is replied."""
        for call_id in call_ids:
            if call_id in self._live:
                self._drop(self._live[call_id])

    def reset(self) -> None:
        """Drop every call, context and reply: their manager is gone, and the next one counts from 1 again."""
        self.abort(list(self._live))
        self._cached.clear()
        self.uses.clear()
        self._replies.clear()

    def free_contexts(self, context_ids: Iterable[ContextId]) -> None:
        """Forget cached contexts; unknown ones, and those of calls still here, are left alone."""
        self._cached.free(context_ids)

    def report_contexts(self) -> None:
        """Let the next replies end with a ContextSnapshot."""
        self._report_is_due = True

    def stats(self) -> EngineStats:
        """Counters and load now."""
        return collect(self.counters, self.tree, len(self._running), len(self._waiting), self._clock())

    @property
    def changed_cost(self) -> StepCost | None:
        """What steps have come to take, if that is something else than at the start."""
        return None if self._live_cost is None else self._live_cost.changed

    def describe_calls(self, limit: int) -> str:
        """The first calls that are here, for a log."""
        return f"{len(self._live)} calls: " + ", ".join([*map(str, self._live.values())][:limit])

    # --- one step ------------------------------------------------------------------------------------------

    def step(self) -> list[Reply]:
        """One iteration; all replies since the last one, in order."""
        if self._live:
            if not self._running and not len(self._waiting) and not len(self._early):
                self._compiling.wait()
            started_us = self._clock()
            try:
                self.counters.hinted_contexts += self.uses.apply(self.tree, self._cached)
                self._enter_compiled()
                self._admit()
                work, reservation = self._build()
                self._report_evictions()
                if reservation is not None:
                    self._compute(work, reservation)
                self._report_evictions()
            except Exception as error:
                log.exception("a step failed outside the model; its calls are given up")
                self._give_up(self._failure(error))
            self._early.let_go()
            self._check_pool()
            if self._has_failed:
                self._has_failed = False
                gc.collect()  # cycles of the traceback may hold memory of the device
            self.counters.num_steps += 1
            took_us = self._clock() - started_us
            self.counters.busy_us += took_us
            if self._live_cost is not None and self._live_cost.ended(took_us):
                self._cost_model = self._live_cost.cost
                self._early.set_cost(self._live_cost.cost)
        if self._report_is_due:
            self._report_is_due = False
            self._replies.append(self._cached.snapshot())
        replies, self._replies = self._replies, []
        return replies

    def _enter_compiled(self) -> None:
        """Calls whose grammars are compiled now, or cannot be."""
        for call, error in self._compiling.take_done():
            if self._live.get(call.call_id) is not call:
                continue  # aborted meanwhile
            try:
                if error is not None:
                    raise error
                self._enter(call)
            except ParrotError as refusal:
                self._fail(call, refusal)

    def _admit(self) -> None:
        if not len(self._waiting):
            return
        room = self.max_batch_size - len(self._running)
        budget = self.max_batch_tokens - sum(call.num_remaining for call in self._running)
        for call, prefix_len in self._waiting.admit(self._running, room, budget):
            if call.admitted_us == 0:
                self.counters.cached_tokens += prefix_len
            call.admitted(prefix_len, self._clock())
            insort(self._running, call, key=attrgetter("order"))
            self._reply_progress(call)  # an empty context has nothing to wait for

    def _build(self) -> tuple[list[Work], Reservation | None]:
        """What this step computes, with its slots; does without early fills and takes blocks from the latest
        applications if it must."""
        work = self._choose()
        while work:
            try:
                return work, reserve(self.tree, work)
            except OutOfBlocks:
                dropped = self._early.let_go()
                if not dropped:
                    dropped = [self._running[-1]]
                    self._preempt(dropped[0])
                work = [w for w in work if w.call not in dropped]
        return [], None

    def _choose(self) -> list[Work]:
        work = choose_work(self._running, self.max_batch_tokens)
        return work + self._early.choose(work, self._waiting, self._running, self.max_batch_size - len(work))

    def _compute(self, work: Sequence[Work], reservation: Reservation) -> None:
        """Forward, sample, commit; a failure of the model ends the calls of this step and no others."""
        outputs = [w.call.output if w.wants_logits else None for w in work]
        try:
            sampled = iter(self._sample(work, outputs, reservation))
        except Exception as error:
            log.exception("a step of %d calls failed", len(work))
            self.tree.rollback(reservation.context_ids)
            for w in work:
                self._fail(w.call, self._failure(error))
            return
        self.tree.commit(reservation.context_ids)
        self.counters.shared_decodes = self._runner.num_shared_decodes
        if self._cost_model is not None:
            self.counters.expected_us += expected_us(self._cost_model, work)
        if self._live_cost is not None:
            self._live_cost.computed(work, self.tree.num_distinct_tokens(reservation.context_ids))
        for w, output in zip(work, outputs, strict=True):
            self._count(w)
            w.call.num_computed += w.count
            self._reply_progress(w.call)
            if output is not None:
                self._accept(w.call, output, next(sampled))

    def _sample(
        self, work: Sequence[Work], outputs: Sequence[Output | None], reservation: Reservation
    ) -> list[int | None]:
        """The next id of each output (:meth:`NextIds.choose`)."""
        return self._next_ids.choose(self.tree, work, outputs, reservation)

    def _accept(self, call: EngineCall, output: Output, token_id: int | None) -> None:
        if token_id is None:
            self._fail(call, EngineError("the model gave logits that are not finite numbers"))
            return
        try:
            text, reason = call.accept(output, token_id, self._clock())
        except InvalidRequest as error:
            self._fail(call, error)
            return
        if text and call.stream:
            self._replies.append(Chunk(call.call_id, output.verb, text, output.take_logprobs()))
        if reason is not None:
            self._end_output(call, output, reason)

    def _end_output(self, call: EngineCall, output: Output, reason: FinishReason) -> None:
        """Reply to a Generate and enter the next verbs; the context is cut to the ids that stay."""
        num_computed = call.num_computed
        self._replies.append(call.finish_output(output, reason, self._encode_rest, self._clock()))
        self.free_contexts(call.advance(self._tokenizer.decode, self._eos_ids))
        if call.num_computed < num_computed:
            self.tree.truncate(call.context_id, call.num_computed)
        try:
            call.check_not_empty()
        except EngineError as error:
            self._fail(call, error)
            return
        self._reply_progress(call)

    def _reply_progress(self, call: EngineCall) -> None:
        """Reply to Fills that are computed, and to the call when it has no more verbs."""
        if call.output is not None and not call.fills:
            return  # most calls of most steps
        self._replies += call.take_filled()
        if not call.ended:
            return
        num_kept = 0 if call.frees_context else call.num_computed
        self._replies.append(CallDone(call.call_id, call.context_id, num_kept))
        if call.frees_context:
            self.tree.free(call.context_id)
        else:
            self._cached.keep(call.context_id)
        if call in self._early:
            self._early.finished(call)
            self.counters.early_fills += 1
        self._forget(call)

    def _report_evictions(self) -> None:
        """What has been evicted since the last report: behind the ends of the calls that it was of, before
        those of calls that end later, which may have put a context of the same blocks in the cache."""
        evicted = self._cached.take_evicted()
        if evicted is not None:
            self._replies.append(evicted)

    def _count(self, work: Work) -> None:
        if work.is_decode:
            self.counters.decode_tokens += work.count
        else:
            self.counters.prefill_tokens += work.count
            self.counters.early_fill_tokens += work.count if work.call in self._early else 0

    # --- the KV cache breaks -------------------------------------------------------------------------------

    def _check_pool(self) -> None:
        try:
            self._pool_guard.check(self.tree, is_idle=not self._live)
        except EngineError as error:
            self._renew_pool(error.message)

    def _renew_pool(self, reason: str) -> None:
        """A new, empty KV cache takes the place of a broken one; calls compute again what they had there."""
        log.error("the KV cache is broken and made anew: %s; %s", reason, self.stats())
        self.counters.pool_breaches += 1
        self.tree.reset()
        self._early.start_anew()
        self._waiting.start_anew(self._running)
        self._running.clear()
        self.uses.clear()
        if (lost := self._cached.start_anew()) is not None:
            self._replies.append(lost)

    def _give_up(self, error: EngineError) -> None:
        """Fail every call, also when the KV cache is what failed."""
        try:
            for call in list(self._live.values()):
                self._fail(call, error)
        except Exception as second:
            self._renew_pool(f"{type(second).__name__}: {second}")
            for call in list(self._live.values()):
                self._fail(call, error)

    # --- calls that leave ----------------------------------------------------------------------------------

    def _preempt(self, call: EngineCall) -> None:
        """Take a call's blocks; it waits again and computes what the cache then lacks."""
        self.counters.preemptions += 1
        self._running.remove(call)
        if self._running:
            self.tree.release(call.context_id)
        else:
            # Alone and still without room: the blocks it shares with the cache are in its own way.
            self.tree.free(call.context_id)
            call.has_context = False
            self.tree.clear_cache()
            if num_blocks_for(len(call.ids)) > self._runner.num_blocks:
                self._fail(call, too_long(call, len(call.ids), self._runner.num_blocks))
                return
        call.num_computed = 0
        self._waiting.add(call)

    def _failure(self, error: Exception) -> EngineError:
        """What the calls of a step that failed end with."""
        self._has_failed = True
        return engine_error(error)

    def _fail(self, call: EngineCall, error: ParrotError) -> None:
        self._drop(call)
        self._replies.append(CallFailed(call.call_id, error.to_info()))

    def _drop(self, call: EngineCall) -> None:
        if call.has_context:
            self.tree.free(call.context_id)
        self._forget(call)

    def _forget(self, call: EngineCall) -> None:
        del self._live[call.call_id]
        self._live_contexts.remove(call.context_id)
        self.counters.calls_ended += 1
        call.has_context = False
        if not remove_in_order(self._running, call):
            (self._early if call in self._early else self._waiting).remove(call)

    # --- small parts ---------------------------------------------------------------------------------------

    def _check_new(self, call: EngineCall) -> None:
        if call.context_id in self._cached or call.context_id in self._live_contexts:
            raise InvalidRequest(f"context {call.context_id} is in use", param="context_id")

    def _encode_rest(self, text: str) -> Ids:
        return self._encoder.encode([Piece(text)], continues=True).token_ids
