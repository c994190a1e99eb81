"""Prefixes of calls that still wait for inputs, computed while nobody else wants the engine (section 5.3).

They are never in the way. A prefix is held only while a step computes a piece of it; between steps what is
there of it is cache like any other, which whoever needs the blocks may take, and which is looked for again
before the next piece. Together they get a quarter of the pool.

What a piece costs is told by the engine's cost model. Beside calls a hundredth of their steps is saved up for
pieces: each reads what is there of its prefix, so that few long ones cost less than many short ones. While
nobody else is there, a piece is short enough not to keep a call that comes waiting for long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf

from .._core import ContextTree
from ..errors import EngineError
from ..wire import ContextId, CostModel
from .admission import WaitingQueue, computing, num_blocks_for
from .cache import CachedContexts
from .call import EngineCall
from .runner import Work

POOL_SHARE = 4  # one part in so many
MAX_SLOWDOWN = 0.01  # of the steps that calls wait for, in the mean
MAX_LONGER = 0.25  # of one such step
MAX_DELAY_US = 20_000.0  # of a call that comes while the engine has nothing else to do
_MIN_PIECE = 16


class EarlyFills:
    """The early fills of an engine, first come first served. ``cost_model`` None: pieces are as long as a
    step may be, and none is computed beside calls."""

    def __init__(
        self, tree: ContextTree, cached: CachedContexts, max_batch_tokens: int, cost_model: CostModel | None
    ) -> None:
        self._tree = tree
        self._cached = cached
        self._max_batch_tokens = max_batch_tokens
        self._cost: CostModel | None = None
        self._per_token_us = 1e-3
        if cost_model is not None:
            self.set_cost(cost_model)
        self._credit_us = 0.0  # that calls have given up and no piece has used
        self._calls: list[EngineCall] = []
        self._held: list[EngineCall] = []  # by the present step
        self._done: dict[ContextId, int] = {}  # blocks of those that are cached

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call: object) -> bool:
        return call in self._calls

    def __iter__(self) -> Iterator[EngineCall]:
        return iter(self._calls)

    def set_cost(self, cost: CostModel) -> None:
        """Steps are from now on known to take so long."""
        self._cost = cost
        self._per_token_us = max(cost.per_prefill_token_us, 1e-3)

    def add(self, call: EngineCall) -> None:
        """One more. Raises :class:`EngineError` if they would be more than their part of the pool."""
        self._done = {key: size for key, size in self._done.items() if key in self._cached}
        sizes = chain(self._done.values(), (num_blocks_for(len(other.ids)) for other in self._calls))
        num_blocks = num_blocks_for(len(call.ids)) + sum(sizes)
        if num_blocks * POOL_SHARE > self._tree.num_blocks:
            raise EngineError(
                f"early fill {call.call_id}: {num_blocks} blocks would be filled ahead of their calls, of a "
                f"pool of {self._tree.num_blocks}"
            )
        self._calls.append(call)

    def remove(self, call: EngineCall) -> None:
        """It is done, failed or not wanted any more."""
        self._calls.remove(call)
        if call in self._held:
            self._held.remove(call)

    def finished(self, call: EngineCall) -> None:
        """All of it is computed and cached under its context's name."""
        self._done[call.context_id] = num_blocks_for(len(call.ids))

    def start_anew(self) -> None:
        """The tree was reset: nothing is there of any of them."""
        self._held.clear()
        self._done.clear()
        for call in self._calls:
            call.has_context, call.num_computed = False, 0

    def choose(
        self, work: Sequence[Work], waiting: WaitingQueue, running: Sequence[EngineCall], max_pieces: int
    ) -> list[Work]:
        """Pieces to compute beside ``work``; their contexts are held until :meth:`let_go`. None while calls
        wait for room, and none of a prefix that a running call is computing."""
        if not self._calls or len(waiting):
            return []
        room = self._max_batch_tokens - sum(w.count for w in work)
        left_us = self._allowance_us(len(work))
        pieces: list[Work] = []
        active = computing(running)
        for call in self._calls:
            must_go_on = not work and not pieces
            if len(pieces) >= max_pieces or self._affordable(call, left_us, room, must_go_on) == 0:
                break
            if waiting.is_being_computed(call, active):
                continue
            self._open(call)
            count = min(call.num_computable, self._affordable(call, left_us, room, must_go_on))
            if count > 0:
                pieces.append(Work(call, count))
                room -= count
                left_us -= self._fixed_us(call) + self._per_token_us * count
        if work:
            self._credit_us = left_us
        return pieces

    def _open(self, call: EngineCall) -> None:
        if call.has_context:
            self._tree.free(call.context_id)
        ids = call.ids.view()
        call.num_computed = self._tree.open(call.context_id, call.domain, ids, len(ids) - 1, call.public_len)
        call.has_context = True
        self._held.append(call)

    def _allowance_us(self, batch: int) -> float:
        """What the pieces of this step may cost."""
        if batch == 0:
            return inf if self._cost is None else MAX_DELAY_US
        if self._cost is None:
            return 0.0
        step_us = self._cost.base_us + self._cost.per_sequence_us * batch
        return min(self._credit_us + MAX_SLOWDOWN * step_us, MAX_LONGER * step_us)

    def _affordable(self, call: EngineCall, left_us: float, room: int, must_go_on: bool) -> int:
        """Tokens of a piece, 0 if it is not worth one: each piece reads all that is there of its prefix."""
        num_tokens = (
            min(room, int((left_us - self._fixed_us(call)) / self._per_token_us)) if left_us < inf else room
        )
        least = min(_MIN_PIECE, call.num_remaining, room)
        if num_tokens >= least:
            return num_tokens
        return least if must_go_on else 0

    def _fixed_us(self, call: EngineCall) -> float:
        if self._cost is None:
            return 0.0
        return self._cost.per_sequence_us + self._cost.per_kv_token_us * call.num_computed

    def let_go(self) -> list[EngineCall]:
        """The step is over, or must do without them: what is there of them is cache. Returns those that were
        held."""
        held, self._held = self._held, []
        for call in held:
            self._tree.release(call.context_id)
        return held
