"""Which contexts ended calls left on engines, as far as the manager knows.

Knowledge is fed by the manager's own calls and cut by what engines report. It is a hint: a call whose context
turns out to be gone is computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from ..wire import ContextId


@dataclass(slots=True)
class Kept:
    """A context on an engine. ``session_id`` None: it is of a one-call session, and serves as a cache until
    its engine evicts it. ``frame``: the number of the frame that told of it, 0 if frames have none."""

    length: int
    session_id: str | None
    frame: int


@dataclass(slots=True)
class Correction:
    """What a snapshot changes: contexts that are shorter than believed (0: gone), and contexts of which
    nobody knows what they are."""

    cut: dict[ContextId, int]
    strangers: list[ContextId]


class ContextLedger:
    """Contexts by engine, at most ``limit(engine)`` of each, and those of sessions by session."""

    def __init__(self) -> None:
        self._by_engine: dict[int, dict[ContextId, Kept]] = {}  # in the order in which they came
        self._limits: dict[int, int] = {}
        self._by_session: dict[str, dict[ContextId, int]] = defaultdict(dict)  # context -> engine

    def engine_joined(self, engine_id: int, limit: int) -> None:
        """An engine without contexts, of which the newest ``limit`` are to be known."""
        self._by_engine[engine_id] = {}
        self._limits[engine_id] = limit

    def engine_lost(self, engine_id: int) -> None:
        """All contexts of this engine are gone."""
        for context_id in list(self._by_engine.get(engine_id, ())):
            self.cut(engine_id, context_id, 0)
        self._by_engine.pop(engine_id, None)
        self._limits.pop(engine_id, None)

    def add(
        self, engine_id: int, context_id: ContextId, length: int, *, session_id: str | None, frame: int = 0
    ) -> list[ContextId]:
        """An ended call left this context. Returns the oldest ones, which are forgotten for it."""
        contexts = self._by_engine[engine_id]
        contexts[context_id] = Kept(length, session_id, frame)
        if session_id is not None:
            self._by_session[session_id][context_id] = engine_id
        return list(islice(contexts, max(0, len(contexts) - self._limits[engine_id])))

    def cut(self, engine_id: int, context_id: ContextId, remaining: int) -> Kept | None:
        """No more than ``remaining`` tokens are left. Returns what was known of a context that is gone."""
        contexts = self._by_engine.get(engine_id, {})
        kept = contexts.get(context_id)
        if kept is None:
            return None
        kept.length = min(kept.length, remaining)
        if kept.length > 0:
            return None
        del contexts[context_id]
        if kept.session_id is not None:
            self._by_session[kept.session_id].pop(context_id, None)
        return kept

    def compare(self, engine_id: int, frame: int, lengths: Mapping[ContextId, int]) -> Correction:
        """What an engine had when it sent frame ``frame`` against what is believed; changes nothing."""
        contexts = self._by_engine.get(engine_id, {})
        known = {context_id: kept for context_id, kept in contexts.items() if kept.frame < frame}
        left = {context_id: lengths.get(context_id, 0) for context_id in known}
        return Correction(
            {context_id: length for context_id, length in left.items() if length < known[context_id].length},
            [context_id for context_id in lengths if context_id not in contexts],
        )

    def take_session(self, session_id: str) -> dict[int, list[ContextId]]:
        """Forget the session; returns its contexts by engine."""
        by_engine: dict[int, list[ContextId]] = {}
        for context_id, engine_id in self._by_session.pop(session_id, {}).items():
            del self._by_engine[engine_id][context_id]
            by_engine.setdefault(engine_id, []).append(context_id)
        return by_engine

    def of_engine(self, engine_id: int) -> dict[ContextId, int]:
        """What is believed of an engine: length by context."""
        return {context_id: kept.length for context_id, kept in self._by_engine.get(engine_id, {}).items()}

    def __len__(self) -> int:
        return sum(map(len, self._by_engine.values()))
