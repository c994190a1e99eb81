"""Sessions: one application instance each, found by id and tenant, gone when idle."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..config import ManagerConfig
from ..errors import DuplicateRequest, SessionNotFound
from ..wire import CallId
from .clock import now_us
from .graph import Graph
from .journal import Journal
from .prompt_table import PromptTable
from .recorder import SessionRecorder
from .tenants import DEFAULT_TENANT, Tenants, internal_id, public_id


@dataclass(eq=False, slots=True)
class Session:
    """One application instance. ``session_id`` is unique in the manager (:func:`internal_id`). ``domain``
    isolates its KV cache: the number of its tenant. It is idle since ``last_used_us`` unless ``num_users``
    requests are waiting in it."""

    session_id: str
    tenant: str
    domain: int
    graph: Graph
    last_used_us: int
    clock: Callable[[], int]
    recorder: SessionRecorder | None = None
    num_users: int = 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While a request waits, the session does not expire."""
        self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1
            self.last_used_us = self.clock()


class SessionTable:
    """All live sessions of a manager. ``clock`` gives microseconds.

    A session is found only by the tenant who made it; to others it does not exist, nor is its id taken.
    """

    def __init__(
        self,
        config: ManagerConfig,
        tenants: Tenants | None = None,
        *,
        clock: Callable[[], int] = now_us,
        journal: Journal | None = None,
        may_defer: bool = False,
    ) -> None:
        """What happens in sessions that can be found goes into ``journal``. ``may_defer``: see
        :class:`Graph`."""
        self._may_defer = may_defer
        self._config = config
        self._journal = journal
        self._clock = clock
        self._idle_us = round(config.session_idle_s * 1e6)
        self._sessions: dict[str, Session] = {}
        self._tenants = tenants or Tenants()
        self.prompts = PromptTable()
        self._call_ids = (CallId(number) for number in itertools.count(1))
        self._hash_key = secrets.token_bytes(16)

    def __len__(self) -> int:
        return len(self._sessions)

    def create(
        self, session_id: str | None = None, *, tenant: str = DEFAULT_TENANT, by_submit: bool = False
    ) -> Session:
        """A new session, under the client's own random id if given; :class:`DuplicateRequest` if the tenant
        has one of that id. ``by_submit``: see :meth:`SessionRecorder.opened`."""
        if session_id is not None and internal_id(session_id, tenant) in self._sessions:
            raise DuplicateRequest(f"session {session_id} exists already", param="session_id")
        recorder = None if self._journal is None else SessionRecorder(self._journal)
        session = self._make(session_id, tenant, recorder)
        if recorder is not None:
            recorder.opened(public_id(session.session_id), tenant, by_submit=by_submit)
        self._sessions[session.session_id] = session
        return session

    def restore(self, session_id: str, tenant: str, recorder: SessionRecorder) -> Session:
        """A session that the journal knows, as yet without calls; used just now."""
        session = self._make(session_id, tenant, recorder)
        self._sessions[session.session_id] = session
        return session

    def create_detached(self, *, tenant: str = DEFAULT_TENANT) -> Session:
        """A session that its maker holds and nobody can find: one call of an endpoint without sessions."""
        return self._make(None, tenant, None)

    def get(self, session_id: str, *, tenant: str = DEFAULT_TENANT) -> Session:
        """The tenant's session, used just now; :class:`SessionNotFound` for any other."""
        session = self._sessions.get(internal_id(session_id, tenant))
        if session is None:
            raise SessionNotFound(
                f"no session {session_id}: it never existed, was deleted, or expired", param="session_id"
            )
        session.last_used_us = self._clock()
        return session

    def find(self, session_id: str, *, tenant: str = DEFAULT_TENANT) -> Session | None:
        """As :meth:`get`, but None if there is none."""
        return self._sessions.get(internal_id(session_id, tenant))

    def remove(self, session_id: str, *, tenant: str = DEFAULT_TENANT) -> Session:
        """Take a session out of the table; closing its graph is up to the caller."""
        session = self.get(session_id, tenant=tenant)
        self._delete(session)
        return session

    def take_idle(self) -> list[Session]:
        """Take out the sessions that no request has named, or waited in, for the idle time."""
        oldest_us = self._clock() - self._idle_us
        idle = [
            session
            for session in self._sessions.values()
            if session.num_users == 0 and session.last_used_us < oldest_us
        ]
        for session in idle:
            self._delete(session)
        return idle

    def _delete(self, session: Session) -> None:
        del self._sessions[session.session_id]
        if session.recorder is not None:
            session.recorder.closed()

    def _make(self, session_id: str | None, tenant: str, recorder: SessionRecorder | None) -> Session:
        session_id = internal_id(session_id or f"s-{secrets.token_hex(16)}", tenant)
        owner = self._tenants.get(tenant)
        domain = owner.number
        graph = Graph(
            session_id,
            config=self._config,
            domain=domain,
            call_ids=self._call_ids,
            prompts=self.prompts,
            hash_key=self._hash_key,
            recorder=recorder,
            held=owner.held,
            may_defer=self._may_defer,
        )
        return Session(session_id, tenant, domain, graph, self._clock(), self._clock, recorder)
