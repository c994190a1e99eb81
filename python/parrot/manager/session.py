"""Sessions: one application instance each, found by id and tenant, closed when idle."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass

from ..config import ManagerConfig
from ..errors import DuplicateRequest, SessionClosed, SessionNotFound
from ..wire import CallId
from .flow import Changes
from .graph import Graph


@dataclass(eq=False, slots=True)
class Session:
    """One application instance. ``domain`` isolates its KV cache: one per tenant. ``number`` is unique for
    the life of the manager. ``arrival_us`` is when the application arrived, for the queues (system order):
    the session's first submit, or its creation until then; later submits inherit it."""

    id: str
    number: int
    tenant: str
    domain: int
    graph: Graph
    arrival_us: int
    last_used_us: int
    has_submitted: bool = False

    def note_submit(self, now_us: int) -> None:
        """A submit is about to be added to the graph."""
        if not self.has_submitted:
            self.has_submitted = True
            self.arrival_us = now_us


@dataclass(frozen=True, slots=True)
class Closed:
    """A session that is gone, and what its end did; ``changes.stopped`` must leave queue and engines."""

    session: Session
    changes: Changes


class SessionTable:
    """All live sessions of a manager. Times are microseconds of the manager's clock, given by the caller.

    A foreign session is not told apart from one that does not exist.
    """

    def __init__(self, config: ManagerConfig) -> None:
        self._config = config
        self._sessions: dict[str, Session] = {}
        self._domains: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._call_ids = (CallId(number) for number in itertools.count(1))
        self._hash_key = secrets.token_bytes(16)

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> tuple[Session, ...]:
        """Every live session, oldest first."""
        return tuple(self._sessions.values())

    def create(self, tenant: str, now_us: int, session_id: str | None = None) -> Session:
        """A new session, under the client's own random id if given; :class:`DuplicateRequest` if that is
        in use (whoever uses it)."""
        session_id = session_id or f"s-{secrets.token_hex(16)}"
        if session_id in self._sessions:
            raise DuplicateRequest(f"session {session_id} exists already", param="session_id")
        domain = self._domains.setdefault(tenant, len(self._domains) + 1)
        graph = Graph(
            session_id,
            config=self._config,
            domain=domain,
            call_ids=self._call_ids,
            hash_key=self._hash_key,
        )
        session = Session(session_id, next(self._numbers), tenant, domain, graph, now_us, now_us)
        self._sessions[session_id] = session
        return session

    def get(self, session_id: str, tenant: str, now_us: int) -> Session:
        """The tenant's session, which is in use now; :class:`SessionNotFound` for any other."""
        session = self._sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise SessionNotFound(
                f"no session {session_id}: it never existed, was deleted, or expired", param="session_id"
            )
        session.last_used_us = max(session.last_used_us, now_us)
        return session

    def delete(self, session_id: str, tenant: str, now_us: int) -> Changes:
        """Close the tenant's session: what is pending ends as :class:`SessionClosed`."""
        session = self.get(session_id, tenant, now_us)
        return self._close(session, "was deleted").changes

    def expire(self, now_us: int) -> list[Closed]:
        """Close the sessions that no request has named for the idle time and that no getter waits in."""
        oldest_us = now_us - round(self._config.session_idle_s * 1e6)
        idle = [session for session in self._sessions.values() if session.last_used_us < oldest_us]
        closed = []
        for session in idle:
            if session.graph.has_waiters:
                session.last_used_us = now_us
            else:
                closed.append(self._close(session, "expired"))
        return closed

    def close_all(self) -> list[Closed]:
        """Close every session: the service ends."""
        return [self._close(session, "ended with the service") for session in self.all()]

    def _close(self, session: Session, how: str) -> Closed:
        del self._sessions[session.id]
        error = SessionClosed(f"session {session.id} {how} while this was pending")
        return Closed(session, session.graph.close(error.to_info()))
