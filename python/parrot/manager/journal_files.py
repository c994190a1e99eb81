"""What SQLite does not notice about its files: that somebody took them away or wrote to them while they are
open, and that what was committed is missing at the next start.

SQLite goes on writing to a file that was deleted, and takes a log with a damaged frame for one that ends
there. So what the files look like is compared between writes, and a mark beside them says what was committed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import JournalError

log = logging.getLogger(__name__)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_Look = tuple[int, int, int, int]  # device, inode, size, time of the last write


class FileChanged(sqlite3.Error):
    """Somebody else took the journal's file, or wrote to it."""


class WatchedFiles:
    """The journal and its log, which nobody else may write or replace while they are open."""

    def __init__(self, path: Path) -> None:
        self._paths = (path, Path(f"{path}-wal"))
        self._seen = [_look(each) for each in self._paths]

    def check(self) -> None:
        """Raise :class:`FileChanged` unless the files are as they were after the last write."""
        for path, seen in zip(self._paths, self._seen, strict=True):
            found = _look(path)
            if found == seen:
                continue
            if found is None:
                raise FileChanged(f"{path.name} was taken away")
            if seen is None or found[:2] != seen[:2]:
                raise FileChanged(f"{path.name} was replaced by another file")
            raise FileChanged(f"{path.name} was changed by another program")

    @contextlib.contextmanager
    def own_write(self) -> Iterator[None]:
        """The block writes, be it in vain: how the files are at its end is right, unless they are others."""
        self.check()
        try:
            yield
        finally:
            for index, path in enumerate(self._paths):
                seen, found = self._seen[index], _look(path)
                if seen is None or (found is not None and found[:2] == seen[:2]):
                    self._seen[index] = found


class Mark:
    """The number of the last row that was committed, in a small file beside the journal."""

    def __init__(self, path: Path) -> None:
        self._path = Path(f"{path}-mark")
        self._boot = _boot_id()
        self._file: int | None = None
        self._is_failing = False

    def check(self, journal: Path, last_lsn: int) -> None:
        """Raise :class:`JournalError` if rows that were committed since the machine was started are missing.
        A loss of power may have undone the last ones, which is only logged."""
        found = self._read()
        if found is None or found[0] <= last_lsn:
            return
        missing = f"rows {last_lsn + 1} to {found[0]}, which were committed, are missing"
        if found[1] != self._boot:
            log.warning("journal = %s: %s; the machine was started anew since", journal, missing)
            return
        with contextlib.suppress(OSError):  # SQLite deletes the log when it is closed
            os.link(f"{journal}-wal", f"{journal}-wal.refused")
        raise JournalError(
            f"journal = {journal} is damaged ({missing}); restore a copy of it and of its -wal, or remove "
            f"{self._path} to start with what is there",
            param="journal",
        )

    def set(self, last_lsn: int) -> None:
        """Everything up to this row is committed."""
        content = f"{last_lsn:020d} {self._boot:36.36}"
        line = f"{content} {zlib.crc32(content.encode()):08x}\n".encode()
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._file, line, 0)
            self._is_failing = False
        except OSError as error:  # the rows are committed nevertheless
            if not self._is_failing:
                log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._is_failing = True

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> tuple[int, str] | None:
        try:
            raw = self._path.read_bytes()
            content, crc = raw[:57], int(raw[58:66], 16)
            if zlib.crc32(content) != crc:
                raise ValueError("checksum")
            return int(content[:20]), content[21:57].decode().strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read (%s): rows that are missing are not noticed", self._path, error)
            return None


def _look(path: Path) -> _Look | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _boot_id() -> str:
    """Differs after each start of the machine; empty where that cannot be known."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
