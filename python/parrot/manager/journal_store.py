"""The journal's file: rows in one SQLite table, appended in transactions and read back one session at a time.

Everything is a row: that a session was opened, what was submitted, how a variable ended, that the session
was closed. Nothing is changed in place, so a group of rows is one INSERT, and what a transaction that was cut
off held is simply not there (WAL; SQLite's checksums find a torn end). Each row has a checksum of its own,
since a flipped bit in a text would otherwise be a wrong value. The file is locked while it is open.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from ..errors import JournalError
from .journal_files import FileChanged, Mark, WatchedFiles

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x50_41_52_52  # "PARR"
_ROWS_PER_STATEMENT = (256, 128, 64, *range(32, 0, -1))
_CHECKPOINT_PAGES = 4000  # of 4 KiB: how much of the log is copied into the table at a time
_MAX_LOG_BYTES = 64 * 2**20  # what the log keeps on disk after a burst
_LAST_LSN = "last_lsn"  # in the table of what is known about the journal
_SCHEMA = """
CREATE TABLE record (
    lsn INTEGER PRIMARY KEY,  -- the order of events
    session INTEGER NOT NULL,  -- a number of the journal's own
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    data BLOB NOT NULL,
    extra BLOB NOT NULL,
    crc INTEGER NOT NULL  -- of kind, name, data (as it was before deflation) and extra
) STRICT;
CREATE INDEX record_session ON record (session);
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
"""


class Kind(StrEnum):
    """What a row says. ``name``, ``data`` and ``extra`` are:

    ======== =================== ========================= =====================================
    OPEN     session id          tenant
    SUBMIT   when, in us         body (JSON, deflated)     ids that the service chose (msgpack)
    VALUE    variable id         its value (UTF-8)
    ERROR    variable id         its ErrorInfo (JSON)
    OUTPUT   variable id         what the engine generated what else is known of it (msgpack)
    LABEL    variable id         what was asked of it, and when (JSON)
    CLOSE
    ======== =================== ========================= =====================================
    """

    OPEN = "open"
    SUBMIT = "submit"
    VALUE = "value"
    ERROR = "error"
    OUTPUT = "output"
    LABEL = "label"
    CLOSE = "close"


class Row(NamedTuple):
    """One entry of a session. ``session`` is the number that its OPEN row introduced."""

    session: int
    kind: Kind
    name: str
    data: bytes = b""
    extra: bytes = b""


class JournalStore:
    """An open journal. Made in one thread, it may be used in another, by one at a time.

    Every method raises :class:`sqlite3.Error` when the disk is full or the file is damaged, except
    :meth:`open`, which explains.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, mark: Mark) -> None:
        self._connection = connection
        self._mark = mark
        purged = self._number(f"SELECT max(value) FROM about WHERE name = '{_LAST_LSN}'")
        self.next_lsn = 1 + max(purged, self._number("SELECT max(lsn) FROM record"))
        mark.check(path, self.next_lsn - 1)
        self._files = WatchedFiles(path)
        self.next_session = 1 + self._number("SELECT max(session) FROM record")

    @classmethod
    def open(cls, path: Path, *, about: dict[str, str]) -> JournalStore:
        """Open or create a journal. ``about`` says whose rows these are; a journal that says otherwise is
        another's. Raises :class:`JournalError` if it is in use, damaged, of another kind, or cannot be
        written."""
        mark = Mark(path)
        with contextlib.suppress(OSError):  # which the next line explains
            # Prompts and values are in it; SQLite's own files take after this one. A file that is there stays
            # untouched: to a manager that has it, a new time of the last write says that it was changed.
            path.touch(mode=0o600, exist_ok=False)
        try:
            connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise explain(path, error) from None
        try:
            is_new = _prepare(connection, path)
            _check_about(connection, path, about)
            if is_new:  # a later start makes nothing anew, hence writes nothing into a log that is damaged
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return cls(connection, path, mark)
        except sqlite3.Error as error:
            connection.close()
            raise explain(path, error) from None
        except JournalError:
            connection.close()
            raise

    def close(self) -> None:
        """Copy the log into the table and let go of the file."""
        self._connection.close()
        self._mark.close()

    def check_files(self) -> None:
        """Raise :class:`FileChanged` if somebody else took the file away, or wrote to it."""
        self._files.check()

    def probe(self) -> None:
        """Write something, so that a disk that takes nothing is noticed."""
        with self._files.own_write():
            self._note_last_lsn()

    def append(self, rows: Sequence[Row]) -> None:
        """Add rows, all or none; when it returns, they survive the end of this process."""
        values = [
            (lsn, row.session, row.kind.value, row.name, _packed(row), row.extra, _checksum(row))
            for lsn, row in enumerate(rows, start=self.next_lsn)
        ]
        statements = list(_statements(values))
        # Each statement lets go of the interpreter, and then waits until the loop does: one that is a
        # transaction by itself does so once, not three times.
        with self._files.own_write():
            if len(statements) == 1:
                self._connection.execute(*statements[0])
            else:
                with self._transaction():
                    for statement, parameters in statements:
                        self._connection.execute(statement, parameters)
        self.next_lsn += len(rows)
        self._mark.set(self.next_lsn - 1)

    def purge(self, sessions: Sequence[int]) -> None:
        """Delete everything of these sessions; the file reuses the room."""
        numbers = ",".join(map(str, sessions))
        with self._files.own_write(), self._transaction():
            self._connection.execute(
                "DELETE FROM record WHERE session IN (SELECT value FROM json_each(?))", (f"[{numbers}]",)
            )
            self._note_last_lsn()

    def _note_last_lsn(self) -> None:
        """The row of this number may be deleted; it was there nevertheless."""
        self._connection.execute(
            "INSERT OR REPLACE INTO about VALUES (?, ?)", (_LAST_LSN, f"{self.next_lsn - 1:020d}")
        )

    def closed_sessions(self) -> list[int]:
        """Sessions that were closed and not purged yet."""
        found = self._connection.execute("SELECT session FROM record WHERE kind = ?", (Kind.CLOSE.value,))
        return [number for (number,) in found]

    def sessions(self) -> Iterator[list[Row]]:
        """The rows of each session in their order, sessions in the order of their opening. Raises
        :class:`ValueError` for a row that is not what was written."""
        found = self._connection.execute(
            "SELECT lsn, session, kind, name, data, extra, crc FROM record ORDER BY session, lsn"
        )
        rows: list[Row] = []
        for lsn, session, kind, name, data, extra, crc in found:
            row = _unpacked(session, kind, name, data, extra)
            if row is None or _checksum(row) != crc:
                raise ValueError(f"row {lsn} is not what was written")
            if rows and rows[0].session != session:
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    def limit_pages(self, num_pages: int) -> None:
        """The file may not grow beyond so many pages of 4 KiB, as on a full disk; 0: no limit."""
        self._connection.execute(f"PRAGMA max_page_count = {num_pages or 2**32 - 2:d}")

    def num_bytes(self) -> int:
        """Of the pages that rows occupy."""
        pages = self._number("PRAGMA page_count") - self._number("PRAGMA freelist_count")
        return pages * self._number("PRAGMA page_size")

    def _number(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0] or 0)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # some errors have rolled back already
                self._connection.execute("ROLLBACK")
            raise


def _prepare(connection: sqlite3.Connection, path: Path) -> bool:
    """Lock the file, and make its tables if it is new. Returns whether it is."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")
    connection.execute("BEGIN IMMEDIATE")
    kind = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    is_new = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if is_new:
        for statement in filter(str.strip, _SCHEMA.split(";\n")):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    elif kind != _APPLICATION_ID:
        raise JournalError(
            f"journal = {path} is a database of something else; name another file", param="journal"
        )
    elif version != SCHEMA_VERSION:
        raise JournalError(
            f"journal = {path} has schema version {version}, this version of Parrot reads {SCHEMA_VERSION}; "
            "start the version that wrote it, or name another file",
            param="journal",
        )
    connection.execute("COMMIT")
    return bool(is_new)


def _check_about(connection: sqlite3.Connection, path: Path, about: dict[str, str]) -> None:
    for name, value in about.items():
        connection.execute("INSERT OR IGNORE INTO about VALUES (?, ?)", (name, value))
        (written,) = connection.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
        if written != value:
            raise JournalError(
                f"journal = {path} was written with {name} {written}, this service has {value}; "
                f"start it with that {name}, or name another file",
                param="journal",
            )


def explain(path: Path, error: Exception | str) -> JournalError:
    """What went wrong with a journal's file, and what helps."""
    text = str(error)
    if "locked" in text:
        message = "is in use by another manager; stop that one, or name another file"
    elif "unable to open" in text:
        message = "cannot be opened; name a file in a directory that exists and is yours"
    elif "readonly" in text or "read-only" in text:
        message = "cannot be written; name a file in a directory that is yours"
    elif "full" in text or "disk I/O error" in text:
        message = f"cannot be written ({text}); make room on its disk, or name a file on another"
    elif isinstance(error, FileChanged) or "was taken away" in text or "by another" in text:
        message = (
            f"is no longer what is open ({text}); put it back as it was, or stop the service: what it was "
            "told since is lost then"
        )
    else:
        message = f"is damaged ({text}); restore a copy of it, or move it away to start without its sessions"
    return JournalError(f"journal = {path} {message}", param="journal")


def _statements(values: Sequence[tuple[object, ...]]) -> Iterator[tuple[str, list[object]]]:
    """Few statements of many rows each; their texts are few enough to stay prepared."""
    begin = 0
    while begin < len(values):
        count = next(count for count in _ROWS_PER_STATEMENT if count <= len(values) - begin)
        part = values[begin : begin + count]
        marks = ",".join(["(?,?,?,?,?,?,?)"] * count)
        yield f"INSERT INTO record VALUES {marks}", [field for row in part for field in row]
        begin += count


def _packed(row: Row) -> bytes:
    """A submit's calls often have one template: a batch takes a tenth of the room and of the writing."""
    return zlib.compress(row.data, 1) if row.kind is Kind.SUBMIT else row.data


def _unpacked(session: int, kind: str, name: str, data: bytes, extra: bytes) -> Row | None:
    """Inverse of :func:`_packed`; None for what it cannot have written."""
    try:
        row = Row(session, Kind(kind), name, data, extra)
        return row._replace(data=zlib.decompress(data)) if row.kind is Kind.SUBMIT else row
    except (ValueError, zlib.error):
        return None


def _checksum(row: Row) -> int:
    head = f"{row.kind} {row.name} {len(row.data)} ".encode()
    return zlib.crc32(row.extra, zlib.crc32(row.data, zlib.crc32(head)))
