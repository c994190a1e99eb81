"""Which contexts finished calls left on engines, so that a session's end can free them."""

from __future__ import annotations

from collections import defaultdict

from ..wire import ContextId


class ContextLedger:
    """Contexts by session. Those of other owners (one-call sessions) are not kept: they serve as prefix
    caches until their engine evicts them."""

    def __init__(self) -> None:
        self._owner: dict[ContextId, str] = {}
        self._by_session: dict[str, dict[ContextId, int]] = defaultdict(dict)  # context -> engine

    def add(self, session_id: str, engine_id: int, context_id: ContextId) -> None:
        """A call of the session left this context."""
        self._owner[context_id] = session_id
        self._by_session[session_id][context_id] = engine_id

    def evicted(self, context_id: ContextId) -> str | None:
        """The engine has nothing left of it. Returns the session that it was of; None for an unknown one."""
        session_id = self._owner.pop(context_id, None)
        if session_id is not None:
            self._by_session[session_id].pop(context_id, None)
        return session_id

    def engine_lost(self, engine_id: int) -> None:
        """All contexts of this engine are gone."""
        for contexts in self._by_session.values():
            for context_id in [key for key, engine in contexts.items() if engine == engine_id]:
                del contexts[context_id]
                del self._owner[context_id]

    def take_session(self, session_id: str) -> dict[int, list[ContextId]]:
        """Forget the session; returns its contexts by engine."""
        by_engine: dict[int, list[ContextId]] = {}
        for context_id, engine_id in self._by_session.pop(session_id, {}).items():
            del self._owner[context_id]
            by_engine.setdefault(engine_id, []).append(context_id)
        return by_engine

    def __len__(self) -> int:
        return len(self._owner)
