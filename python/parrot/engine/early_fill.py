"""Prefixes of calls that still wait for inputs, computed while nobody else wants the engine (section 5.3).

They are never in the way. A prefix is held only while a step computes a piece of it; between steps what is
there of it is cache like any other, which whoever needs the blocks may take, and which is looked for again
before the next piece. Together they get a quarter of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from .._core import ContextTree
from ..errors import EngineError
from ..wire import ContextId, CostModel
from .admission import WaitingQueue, num_blocks_for
from .cache import CachedContexts
from .call import EngineCall
from .runner import Work

POOL_SHARE = 4  # one part in so many
MAX_SLOWDOWN = 0.02  # of a step that calls wait for
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
        self._cost = cost_model
        self._calls: list[EngineCall] = []
        self._held: list[EngineCall] = []  # by the present step
        self._done: dict[ContextId, int] = {}  # blocks of those that are cached

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call: object) -> bool:
        return call in self._calls

    def __iter__(self) -> Iterator[EngineCall]:
        return iter(self._calls)

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
        budget = self._budget(work)
        pieces: list[Work] = []
        for call in self._calls:
            if budget <= 0 or len(pieces) >= max_pieces:
                break
            if waiting.is_being_computed(call, running):
                continue
            self._open(call)
            count = min(call.num_computable, budget)
            pieces.append(Work(call, count))
            budget -= count
        return pieces

    def _open(self, call: EngineCall) -> None:
        if call.has_context:
            self._tree.free(call.context_id)
        ids = call.ids.view()
        call.num_computed = self._tree.open(call.context_id, call.domain, ids, len(ids) - 1, call.public_len)
        call.has_context = True
        self._held.append(call)

    def _budget(self, work: Sequence[Work]) -> int:
        room = self._max_batch_tokens - sum(w.count for w in work)
        if self._cost is None:
            return 0 if work else room
        per_token_us = max(self._cost.per_prefill_token_us, 1e-3)
        if not work:
            return min(room, max(_MIN_PIECE, int(MAX_DELAY_US / per_token_us)))
        step_us = self._cost.base_us + self._cost.per_sequence_us * len(work)
        return min(room, int(MAX_SLOWDOWN * step_us / per_token_us))

    def let_go(self) -> list[EngineCall]:
        """The step is over, or must do without them: what is there of them is cache. Returns those that were
        held."""
        held, self._held = self._held, []
        for call in held:
            self._tree.release(call.context_id)
        return held
