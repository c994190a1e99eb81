"""Which service is used: connections, and the session that calls of this thread or task go to.

``P.connect`` names a service; without it the environment variable ``PARROT_URL`` does; without either an
embedded service is started. One connection is the process's default.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine, Iterable
from contextvars import ContextVar
from types import TracebackType

import httpx

from ..config import DEFAULT_MODEL
from ..errors import InvalidRequest
from . import background, embedded
from .client import Client, check_url
from .session import Batch, Session
from .variable import SemanticVariable

_EXIT_S = 0.7  # how long a program's end may be held up to delete its sessions

_lock = threading.Lock()
_default: Connection | None = None
_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_current: ContextVar[SessionScope | None] = ContextVar("parrot_session", default=None)


class Connection:
    """A service and the pooled connections to it. Made by :func:`connect`; usable as a context manager."""

    def __init__(
        self,
        url: str | None,
        api_key: str | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        model: str = DEFAULT_MODEL,
        reconnect_s: float | None = None,
    ) -> None:
        self._url = None if url is None else check_url(url)
        self._service = embedded.service(model) if self._url is None else None
        self.client = Client(self._find_url, api_key, transport, reconnect_s)
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._pid = os.getpid()
        self._outer: list[SessionScope | None] = []
        _connections.add(self)

    @property
    def url(self) -> str:
        """The service's URL; waits for an embedded service to start."""
        return background.wait(background.run(self._find_url()))

    @property
    def default_session(self) -> Session:
        """The session of calls made outside every ``with P.session()``."""
        with self._lock:
            if self._session is None or self._session.closed or self._pid != os.getpid():
                self._pid = os.getpid()
                self._session = self._open(renewable=True)
            return self._session

    def session(self) -> SessionScope:
        """A new session; its variables and calls end with the ``with`` block."""
        with self._lock:
            return SessionScope(self._open(renewable=False))

    def close(self) -> None:
        """Delete this connection's sessions and close its sockets. An embedded service stays up for reuse."""
        global _default
        with _lock:
            if _default is self:
                _default = None
        with contextlib.suppress(TimeoutError):
            background.run(self.shut(delete=True)).result(5.0)

    async def shut(self, *, delete: bool) -> None:
        """End all sessions, telling the service if ``delete``, and close the sockets."""
        sessions = [session for session in self._sessions if not session.closed]
        ends = [work for session in sessions if (work := session.end()) is not None]
        if delete and self._pid == os.getpid():
            await asyncio.gather(*ends, return_exceptions=True)
        else:
            for work in ends:
                work.close()
        await self.client.close()

    @property
    def embedded(self) -> bool:
        """Whether the service is a child of this process."""
        return self._service is not None

    def __enter__(self) -> Connection:
        self._outer.append(_current.get())
        _current.set(None)  # calls in the block go here, even inside another connection's session
        return self

    def __exit__(self, *_: object) -> None:
        _current.set(self._outer.pop())
        self.close()

    def __repr__(self) -> str:
        return f"<Connection {self._url or 'embedded'}>"

    def _open(self, *, renewable: bool) -> Session:
        session = Session(self.client, renewable=renewable)
        self._sessions.add(session)
        return session

    async def _find_url(self) -> str:
        if self._service is not None:
            return await self._service.find_url()
        return self._url or ""


class SessionScope:
    """``with P.session() as session:`` - calls inside go to this session, which ends with the block."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._outer: list[SessionScope | None] = []

    @property
    def id(self) -> str:
        """The session's id at the service."""
        return self.session.id

    def close(self) -> None:
        """End the session; what is still pending in it ends as :class:`SessionClosed`."""
        self.session.close()

    def __enter__(self) -> SessionScope:
        self._outer.append(_current.get())
        _current.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _current.set(self._outer.pop())
        self.close()


def connect(
    url: str | None = None,
    api_key: str | None = None,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    model: str = DEFAULT_MODEL,
    reconnect_s: float | None = None,
) -> Connection:
    """Use the service at ``url`` from now on; without one ``PARROT_URL``, else an embedded one of ``model``.

    Nothing is sent yet. ``transport`` replaces the HTTP transport. A service out of reach is tried again for
    ``reconnect_s`` seconds; by default for a minute if it keeps a journal, else not at all.

    Raises :class:`InvalidRequest` for a bad URL and :class:`SetupError`, which names the command that helps,
    when an embedded service cannot start.
    """
    global _default
    connection = Connection(
        url or os.environ.get("PARROT_URL"),
        api_key or os.environ.get("PARROT_API_KEY"),
        transport=transport,
        model=model,
        reconnect_s=reconnect_s,
    )
    with _lock:
        _default = connection
    return connection


def default_connection() -> Connection:
    """The connection made last, or a new one as :func:`connect` without arguments would make it."""
    with _lock:
        existing = _default
    return existing if existing is not None else connect()


def session() -> SessionScope:
    """A new session on the default connection."""
    return default_connection().session()


def current_session() -> Session:
    """The innermost ``with P.session()`` of this thread or task, else the connection's default session."""
    scope = _current.get()
    return scope.session if scope is not None else default_connection().default_session


def batch() -> Batch:
    """``with P.batch():`` - calls inside travel together when the block ends. See :class:`Batch`."""
    return Batch(current_session())


def session_of(variables: Iterable[SemanticVariable]) -> Session:
    """The session that the first bound variable belongs to, else the current one."""
    return next((v.session for v in variables if v.session is not None), None) or current_session()


def session_for_call(bound: dict[str, SemanticVariable], where: str) -> Session:
    """The session of a call: the enclosing ``with P.session()``, else its variables', else the default one.

    Raises :class:`InvalidRequest` naming the placeholder if a variable belongs to another one."""
    scope = _current.get()
    session = scope.session if scope is not None else session_of(bound.values())
    for name, variable in bound.items():
        if variable.session not in (None, session):
            raise InvalidRequest(
                f"{where}: the variable passed for {name!r} belongs to another session; a variable is valid "
                "in the session it was first used in: pass its value, with .get()",
                param=name,
            )
    return session


def _at_exit() -> None:
    open_connections = list(_connections)
    if open_connections:
        work = (connection.shut(delete=not connection.embedded) for connection in open_connections)
        with contextlib.suppress(Exception):
            background.run(_all(work)).result(_EXIT_S)
    background.stop()
    embedded.stop_all()


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    await asyncio.gather(*work, return_exceptions=True)


atexit.register(_at_exit)
