"""The journal: what a client was told survives the manager's own death.

Events are handed over on the event loop and written by a thread, once a request waits for one of them or a
moment has passed; one transaction takes all that has gathered, and the requests that wait for one of its
events are answered when it is committed: values that nobody asks for cost no transaction of their own. A
commit is a write into the system's page cache (synchronous NORMAL): it survives the end of the process,
and a loss of power up to the last commits.

While the disk is full, events stay here and are tried again; those who wait, or come, get
:class:`JournalUnavailable`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import JournalUnavailable
from .journal_store import JournalStore, Kind, Row, explain

log = logging.getLogger(__name__)
_FLUSH_S = 0.05  # what nobody waits for is written after so long
_RETRY_S = 1.0
_MAX_ROWS = 2048  # of one transaction
_MAX_BYTES = 8 * 2**20
_PURGE_AT = 64  # closed sessions that are deleted together


class Journal:
    """Used on the loop alone, except for the thread's own part. ``problem``: why nothing can be written."""

    def __init__(self, path: Path, store: JournalStore) -> None:
        self.path = path
        self.problem: str | None = None
        self.num_commits = 0
        self._store = store
        self._next_session = store.next_session
        self._num_appended = 0
        self._num_committed = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap, by ticket
        self._order = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._has_work = threading.Condition()
        self._closed: list[int] = []  # sessions that were closed and are still in the file at the start
        self._events: deque[Sequence[Row]] = deque()  # handed over, not yet taken by the thread
        self._is_flush_due = False
        self._is_wanted = False  # somebody waits, or has waited long enough
        self._is_closing = False

    @classmethod
    def open(cls, path: Path, *, about: dict[str, str]) -> Journal:
        """Open or create the file; see :meth:`JournalStore.open`."""
        return cls(path, JournalStore.open(path, about=about))

    @property
    def num_bytes(self) -> int:
        """Of the file's pages that rows occupy; only while it is not being written."""
        return self._store.num_bytes()

    def recover(self) -> Iterator[list[Row]]:
        """The rows of every session that was not closed, before :meth:`start`. Raises
        :class:`JournalError` for a damaged file."""
        try:
            self._closed = self._store.closed_sessions()  # the thread deletes them: the disk may be full now
            closed = set(self._closed)
            yield from (rows for rows in self._store.sessions() if rows[0].session not in closed)
        except (sqlite3.Error, ValueError) as error:
            raise explain(self.path, error) from None

    def start(self) -> None:
        """Begin to write, for the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Write what is there and let go of the file. Who still waits is told that it is too late."""
        if self._thread.is_alive():
            with self._has_work:
                self._is_closing = True
                self._has_work.notify()
            self._thread.join()
        self._store.close()
        self._release("the service has ended")

    # --- on the loop ---------------------------------------------------------------------------------------

    def new_session(self) -> int:
        """The number of a session that is about to be opened."""
        number = self._next_session
        self._next_session += 1
        return number

    def append(self, event: Sequence[Row]) -> int:
        """Hand over rows that are true together; returns a ticket for :meth:`committed`."""
        self._events.append(event)
        self._num_appended += 1
        if not self._is_flush_due and self._loop is not None:
            self._is_flush_due = True
            self._loop.call_later(_FLUSH_S, self._flush)
        return self._num_appended

    async def committed(self, ticket: int) -> None:
        """Wait until the event of this ticket, and all before it, are on record. Raises
        :class:`JournalUnavailable` if that takes a repair of the disk."""
        if ticket <= self._num_committed:
            return
        self.check()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (ticket, next(self._order), future))
        self._wake()
        await future

    @property
    def last_ticket(self) -> int:
        """Of everything that was handed over."""
        return self._num_appended

    def check(self) -> None:
        """Raise :class:`JournalUnavailable` while nothing can be written."""
        if self.problem is not None:
            raise JournalUnavailable(self.problem)

    def _flush(self) -> None:
        self._is_flush_due = False
        self._wake()

    def _wake(self) -> None:
        if not self._is_wanted:
            with self._has_work:
                self._is_wanted = True
                self._has_work.notify()

    def _written(self, num_events: int) -> None:
        self._num_committed += num_events
        self.num_commits += num_events > 0
        if self.problem is not None:
            log.warning("the journal is written again")
            self.problem = None
        while self._waiting and self._waiting[0][0] <= self._num_committed:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)

    def _fail(self, reason: str) -> None:
        problem = f"the service cannot keep what it is told ({reason}); try again later"
        if self.problem != problem:
            log.error("the journal cannot be written: %s", explain(self.path, reason).message)
        self.problem = problem
        self._release(problem)

    def _release(self, problem: str) -> None:
        waiting, self._waiting = self._waiting, []
        for _, _, future in waiting:
            if not future.done():
                future.set_exception(JournalUnavailable(problem))

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:
            log.exception("the journal's thread has ended")
            self._tell(self._fail, f"its thread has ended: {type(error).__name__}")

    def _write_all(self) -> None:
        events: list[Sequence[Row]] = []
        closed, self._closed = self._closed, []
        is_in_doubt = True  # at the start, and after a failure: whether anything can be written
        while True:
            if not is_in_doubt:
                self._take(events)
                if not events and self._is_closing:
                    return
            try:
                if is_in_doubt:
                    self._store.probe()
                    self._tell(self._written, 0)
                    is_in_doubt = False
                else:
                    self._write(events, closed)
            except Exception as error:
                is_in_doubt = True
                if not isinstance(error, sqlite3.Error):
                    log.exception("events that cannot be written")
                self._tell(self._fail, str(error))
                if self._pause():
                    self._take(events)
                    if events:
                        log.error("%d events are lost: %s", len(events), explain(self.path, error).message)
                    return

    def _take(self, events: list[Sequence[Row]]) -> None:
        """Add what was handed over; if nothing is there to write, wait a moment for somebody who wants it
        written."""
        with self._has_work:
            if not events:
                self._has_work.wait_for(lambda: self._is_wanted or self._is_closing, _RETRY_S)
            self._is_wanted = False
        with contextlib.suppress(IndexError):
            while True:
                events.append(self._events.popleft())

    def _write(self, events: list[Sequence[Row]], closed: list[int]) -> None:
        """Commit the first events; delete closed sessions when there are many, or nothing else to do."""
        count = _group_size(events)
        if count == 0:
            self._store.check_files()
        else:
            rows = list(itertools.chain.from_iterable(events[:count]))
            self._store.append(rows)
            closed += [row.session for row in rows if row.kind is Kind.CLOSE]
            del events[:count]
            self._tell(self._written, count)
        if closed and (count == 0 or len(closed) >= _PURGE_AT):
            self._store.purge(closed)
            closed.clear()
            self._tell(self._written, 0)

    def _pause(self) -> bool:
        """Wait before the next attempt; whether there is none."""
        with self._has_work:
            return self._has_work.wait_for(lambda: self._is_closing, _RETRY_S)

    def _tell(self, tell: Callable[[Any], None], what: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(tell, what)


def _group_size(events: Sequence[Sequence[Row]]) -> int:
    """How many events one transaction takes, at least one if there is one."""
    num_rows = num_bytes = 0
    for count, event in enumerate(events):
        num_rows += len(event)
        num_bytes += sum(len(row.data) + len(row.extra) for row in event)
        if num_rows > _MAX_ROWS or num_bytes > _MAX_BYTES:
            return count + 1
    return len(events)
