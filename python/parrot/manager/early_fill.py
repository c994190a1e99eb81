"""Beginnings of calls that wait for inputs, filled ahead of them (paper section 5.3, docs/scheduling.md).

What a waiting call is known to begin with, constant text and values that exist, is computed by an engine that
has time to spare, on the engine where the call would be best off; the scheduler then draws the call there. It
is a bet that costs nobody anything: engines compute it last and give it up first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import wire
from ..errors import ParrotError
from ..tokenizer import EncodedPrompt, Piece
from .application import Application
from .call import WAITING, Call, InputPart, OutputPart, TextPart
from .clock import now_s
from .dispatcher import THREAD_CHARS, Dispatcher
from .engines import Engine
from .knowledge import PrefixKnowledge
from .prompts import BLOCK_SIZE, PromptBuilder, RunPrompt, num_chars
from .runs import Run
from .uses import part_keys

log = logging.getLogger(__name__)
MIN_TOKENS = 32
POOL_SHARE = 4  # of an engine's pool, one part in so many
_SLICE_S = 0.002

Key = tuple[str, tuple[Hashable, ...]]


@dataclass(eq=False, slots=True)
class _Fill:
    """A prefix on its way to an engine or there, and the calls of its session that begin with it and have not
    ended. ``num_tokens``: 0 until all of it is there."""

    run: Run
    engine: Engine
    key: Key
    calls: dict[Call, None]
    num_tokens: int = 0

    @property
    def num_blocks(self) -> int:
        return -(-len(self.run.prompt.first) // BLOCK_SIZE)


@dataclass(slots=True)
class EarlyFillCounters:
    """Since the manager started. ``tokens_used``: prompt tokens of calls that the engine of their finished
    fill had cached."""

    started: int = 0
    finished: int = 0
    cancelled: int = 0  # a call came first, or nobody waits any more
    tokens: int = 0
    tokens_used: int = 0

    def fills(self) -> dict[str, int]:
        """Prefixes by what became of them."""
        return {"started": self.started, "finished": self.finished, "cancelled": self.cancelled}

    def token_counts(self) -> dict[str, int]:
        """Tokens that were filled, and that calls found."""
        return {"filled": self.tokens, "used": self.tokens_used}


@dataclass(slots=True)
class EarlyFills:
    """The early fills of all sessions. Used on the loop only; with ``is_on`` False it does nothing."""

    is_on: bool
    prompts: PromptBuilder
    knowledge: PrefixKnowledge
    dispatcher: Dispatcher
    application: Callable[[Call], Application]
    counters: EarlyFillCounters = field(default_factory=EarlyFillCounters)
    _pending: dict[Call, None] = field(default_factory=dict)  # to be looked at
    _encoding: dict[Call, asyncio.Task[None]] = field(default_factory=dict)
    _by_call: dict[Call, _Fill] = field(default_factory=dict)
    _by_key: dict[Key, _Fill] = field(default_factory=dict)
    _by_run: dict[wire.CallId, _Fill] = field(default_factory=dict)  # unfinished
    _blocks: dict[Engine, int] = field(default_factory=lambda: defaultdict(int))
    _turn_is_due: bool = False

    # --- events ---

    def submitted(self, calls: Iterable[Call]) -> None:
        """Calls that may have to wait."""
        if self.is_on:
            self._pending.update(dict.fromkeys(call for call in calls if call.state is WAITING))

    def dispatched(self, call: Call) -> None:
        """The call runs: it computes itself what is not there."""
        self._forget(call)
        fill = self._by_call.get(call)
        if fill is not None and not fill.num_tokens:
            self._give_up(fill)

    def ended(self, call: Call) -> None:
        """The call needs its prefix no more; the last one releases it."""
        self._forget(call)
        fill = self._by_call.pop(call, None)
        if fill is None:
            return
        del fill.calls[call]
        if not fill.calls:
            self._give_up(fill)

    def found(self, run: Run, cached_tokens: int) -> None:
        """The run's engine had so many tokens of its prompt."""
        fill = self._by_call.get(run.call)
        if fill is not None and fill.engine is run.engine:
            self.counters.tokens_used += min(cached_tokens, fill.num_tokens)

    def replied(self, engine: Engine, reply: wire.Reply) -> None:
        """A reply to a run that is none of a call."""
        if not isinstance(reply, wire.CallDone | wire.CallFailed):
            return
        fill = self._by_run.get(reply.call_id)
        if fill is None or fill.engine is not engine:
            return
        if isinstance(reply, wire.CallFailed) or reply.num_tokens == 0:
            self._give_up(fill)
            return
        del self._by_run[reply.call_id]
        fill.num_tokens = reply.num_tokens
        self.counters.finished += 1
        self.counters.tokens += reply.num_tokens
        self.knowledge.left(engine, fill.run, reply.num_tokens)

    def engine_lost(self, engine: Engine) -> None:
        """What it had is gone; waiting calls get another one."""
        for fill in [fill for fill in self._by_key.values() if fill.engine is engine]:
            calls = list(fill.calls)
            self._drop(fill)
            self.submitted(calls)
        self._blocks.pop(engine, None)

    def frames_lost(self, engine: Engine) -> None:
        """Messages to or from the engine did not arrive: nobody knows what became of its unfinished fills."""
        for fill in [fill for fill in self._by_run.values() if fill.engine is engine]:
            self._give_up(fill)

    # --- from a waiting call to a frame ---

    def turn(self) -> None:
        """Start fills, for at most a slice of time; after what is ready has been sent."""
        self._turn_is_due = False
        started = now_s()
        while self._pending and self.knowledge.registry.alive and now_s() - started < _SLICE_S:
            call = next(iter(self._pending))
            del self._pending[call]
            try:
                self._consider(call)
            except ParrotError:
                pass  # the call will end with it
            except Exception:
                log.exception("nothing is filled ahead of call %s", call.name)
        if self._pending and self.knowledge.registry.alive and not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self.turn)

    def _consider(self, call: Call) -> None:
        num_parts = _num_known_parts(call)
        if call.state is not WAITING or call.next_step > 0 or num_parts == 0:
            return
        key = (call.session_id, part_keys(call)[:num_parts])
        known = self._by_key.get(key)
        if known is not None:
            self._by_call[call] = known
            known.calls[call] = None
            return
        pieces = self.prompts.prefix_pieces(call, num_parts)
        if num_chars([pieces]) < MIN_TOKENS or not any(
            self._room(engine) > 1 for engine in self.knowledge.registry.alive
        ):
            return
        if self.prompts.num_new_chars([pieces], first_step=0, domain=call.domain) > THREAD_CHARS:
            self._encoding[call] = asyncio.create_task(self._encode_in_thread(call, key, pieces))
        else:
            self._start(call, key, self.prompts.encode([pieces], first_step=0, domain=call.domain)[0])

    async def _encode_in_thread(self, call: Call, key: Key, pieces: Sequence[Piece]) -> None:
        try:
            (prompt,) = await asyncio.to_thread(
                self.prompts.encode, [pieces], first_step=0, domain=call.domain
            )
        except ParrotError:  # which the call will end with
            return
        finally:
            self._encoding.pop(call, None)
        if call.state is WAITING and key not in self._by_key:
            self._start(call, key, prompt)

    def _start(self, call: Call, key: Key, prompt: EncodedPrompt) -> None:
        """Send the prefix to the engine where the call would be best off, unless some engine has it."""
        length = int(prompt.piece_ends[-1])
        if length < MIN_TOKENS:
            return
        boundaries = prompt.boundaries[prompt.boundaries <= length]
        ids = np.ascontiguousarray(prompt.token_ids[:length])
        run_id = self.dispatcher.new_id()
        run = Run(
            wire.CallId(run_id),
            wire.ContextId(run_id),
            call,
            self.application(call),
            RunPrompt(ids, boundaries, (), prompt.piece_ends, min(prompt.public_len, length)),
        )
        candidates = self.knowledge.scheduler.candidates(run)
        if any(candidate.prefix_len == length for candidate in candidates):
            return
        for candidate in candidates:
            engine = self.knowledge.registry.get(candidate.engine_id)
            fill = None if engine is None else _Fill(run, engine, key, {call: None})
            if fill is not None and fill.num_blocks <= self._room(fill.engine):
                self._send(fill)
                return

    def _send(self, fill: _Fill) -> None:
        run, engine = fill.run, fill.engine
        self._by_key[fill.key] = self._by_run[run.run_id] = self._by_call[run.call] = fill
        self._blocks[engine] += fill.num_blocks
        self.counters.started += 1
        self.knowledge.scheduler.add_context(engine, run)
        self.knowledge.registry.send(engine, run.early_fill())

    def _room(self, engine: Engine) -> int:
        """Blocks that may yet be filled ahead."""
        return engine.registration.cost_model.num_blocks // POOL_SHARE - self._blocks[engine]

    # --- the end of one ---

    def _forget(self, call: Call) -> None:
        self._pending.pop(call, None)
        encoding = self._encoding.pop(call, None)
        if encoding is not None:
            encoding.cancel()

    def _give_up(self, fill: _Fill) -> None:
        """It is not wanted any more: an unfinished one is stopped, a finished one evicted first."""
        self._drop(fill)
        if not fill.num_tokens:
            self.counters.cancelled += 1
            self.knowledge.registry.send(fill.engine, wire.Abort((fill.run.run_id,)))
        self.knowledge.release(fill.engine, fill.run.context_id)

    def _drop(self, fill: _Fill) -> None:
        self._by_run.pop(fill.run.run_id, None)
        del self._by_key[fill.key]
        for call in fill.calls:
            del self._by_call[call]
        fill.calls.clear()
        self._blocks[fill.engine] -= fill.num_blocks


def _num_known_parts(call: Call) -> int:
    """Parts before the first input without a value, or the first output."""
    for number, part in enumerate(call.parts):
        if isinstance(part, OutputPart) or (isinstance(part, InputPart) and part.binding.text is None):
            return number
        assert isinstance(part, TextPart | InputPart)
    return len(call.parts)
