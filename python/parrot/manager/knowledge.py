"""What the manager knows of the engines' caches: who has which context, and up to where (paper section 5.3).

The scheduler's index gets it from here, and so does what is told of the future of contexts. Engines report
evictions per step; when a frame of theirs was lost, they are asked what they have, and the answer replaces
what was believed.
"""

from __future__ import annotations

import logging

from .. import wire
from .contexts import ContextLedger
from .engines import Engine, EngineRegistry
from .runs import Run
from .scheduler_bridge import SchedulerBridge
from .uses import ContextUses

log = logging.getLogger(__name__)


class PrefixKnowledge:
    """Follows the contexts of all engines. Used on the loop only."""

    def __init__(
        self, registry: EngineRegistry, scheduler: SchedulerBridge, uses: ContextUses | None
    ) -> None:
        self.registry = registry
        self.scheduler = scheduler
        self._uses = uses
        self.ledger = ContextLedger()
        self.num_snapshots = 0  # that engines were asked for, and sent

    def engine_joined(self, engine: Engine) -> None:
        """It has no contexts."""
        limit = wire.max_cached_contexts(engine.registration.cost_model.num_blocks)
        self.ledger.engine_joined(engine.engine_id, limit)

    def engine_lost(self, engine: Engine) -> None:
        """Its contexts are gone; the scheduler has been told of the engine."""
        self.ledger.engine_lost(engine.engine_id)
        if self._uses is not None:
            self._uses.engine_lost(engine.engine_id)

    def tell_uses(self) -> None:
        """After what a turn dispatches, which would wait for it. An engine within a step hears of both before
        it admits a call; one that has nothing to do seldom has to make room."""
        news = self._uses.take_news() if self._uses is not None else {}
        for engine_id, message in news.items():
            engine = self.registry.get(engine_id)
            if engine is not None:
                self.registry.send(engine, message)

    def left(self, engine: Engine, run: Run, num_tokens: int) -> None:
        """The run ended and its context stayed, as the scheduler knows already."""
        session_id = run.call.session_id if run.application.single is None else None
        is_over = session_id is not None and run.application.closed
        if is_over or engine.frames.is_outdated or num_tokens == 0:
            self.free(engine.engine_id, [run.context_id])
            return
        number = engine.frames.current
        too_many = self.ledger.add(
            engine.engine_id, run.context_id, num_tokens, session_id=session_id, frame=number
        )
        if session_id is not None and self._uses is not None:
            self._uses.left(run, engine.engine_id)
        for context_id in too_many:
            self._cut(engine.engine_id, context_id, 0)

    def closed(self, session_id: str) -> None:
        """The session ended: its contexts are freed at once."""
        for engine_id, context_ids in self.ledger.take_session(session_id).items():
            self.free(engine_id, context_ids)
        if self._uses is not None:
            self._uses.closed(session_id)

    def free(self, engine_id: int, context_ids: list[wire.ContextId]) -> None:
        """Nobody will name these contexts again."""
        for context_id in context_ids:
            self.scheduler.forget_context(engine_id, context_id, 0)
        engine = self.registry.get(engine_id)
        if engine is not None and context_ids:
            self.registry.send(engine, wire.FreeContexts(tuple(context_ids)))

    def release(self, engine: Engine, context_id: wire.ContextId) -> None:
        """Nobody will name this context again, whether or not it is there yet."""
        self._cut(engine.engine_id, context_id, 0)
        self.registry.free_later(engine, context_id)

    def evicted(self, engine: Engine, report: wire.ContextsEvicted) -> None:
        """Contexts lost tokens."""
        for context_id, remaining in zip(report.context_ids, report.remaining, strict=False):
            self._cut(engine.engine_id, context_id, remaining)

    def reported(self, engine: Engine, snapshot: wire.ContextSnapshot) -> None:
        """What the engine has replaces what was believed; what nobody knows of there is freed."""
        self.num_snapshots += 1
        number = engine.frames.current
        lengths = dict(zip(snapshot.context_ids, snapshot.lengths, strict=False))
        correction = self.ledger.compare(engine.engine_id, number, lengths)
        for context_id, remaining in correction.cut.items():
            self._cut(engine.engine_id, context_id, remaining)
        self.free(engine.engine_id, correction.strangers)
        engine.frames.reported()
        log.info(
            "engine %s said what it has: %d contexts, of which %d were known longer and %d not at all",
            *(engine.name, len(lengths), len(correction.cut), len(correction.strangers)),
        )

    def _cut(self, engine_id: int, context_id: wire.ContextId, remaining: int) -> None:
        self.scheduler.forget_context(engine_id, context_id, remaining)
        gone = self.ledger.cut(engine_id, context_id, remaining)
        if gone is not None and gone.session_id is not None and self._uses is not None:
            self._uses.evicted(gone.session_id, context_id)
