"""A journal whose files somebody else takes away or writes to, while it is open and before the next start."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from parrot.errors import JournalError, JournalUnavailable
from parrot.manager import journal as journal_module
from parrot.manager import journal_files
from parrot.manager.journal import Journal
from parrot.manager.journal_store import JournalStore, Kind, Row

ABOUT = {"tokenizer": "t"}
RESTART = (
    r"rows 1 to 3, which were committed, are missing\); restore a copy .* remove .*journal-mark to start"
)


def value_row(number: int, size: int = 10) -> Row:
    return Row(1, Kind.VALUE, f"v{number}", b"x" * size)


def open_store(path: Path) -> JournalStore:
    return JournalStore.open(path, about=ABOUT)


def names_of(store: JournalStore) -> list[str]:
    return [row.name for rows in store.sessions() for row in rows]


def log_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def replace(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.write_bytes(path.with_name("other").read_bytes())


def overwrite(path: Path, at: int = 100) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"Q" * 64)
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))  # the clock of files has ticks


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "its log deleted": lambda path: log_of(path).unlink(),
    "emptied": lambda path: os.truncate(path, 0),
    "its log emptied": lambda path: os.truncate(log_of(path), 0),
    "replaced": replace,
    "overwritten": overwrite,
    "its log overwritten": lambda path: overwrite(log_of(path)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_files_that_change_while_they_are_open_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object]
) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 30.0)

    async def main() -> None:
        journal = Journal.open(tmp_path / "journal", about=ABOUT)
        journal.start()
        await journal.committed(journal.append([value_row(0)]))
        damage(tmp_path / "journal")
        with pytest.raises(JournalUnavailable, match=r"was (taken away|replaced by|changed by)"):
            await journal.committed(journal.append([value_row(1)]))
        with pytest.raises(JournalUnavailable):
            journal.check()
        journal.close()

    asyncio.run(main())


def test_a_file_that_is_gone_is_noticed_without_a_request_and_its_return_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.02)
    path, away = tmp_path / "journal", tmp_path / "away"

    async def main() -> None:
        journal = Journal.open(path, about=ABOUT)
        journal.start()
        await journal.committed(journal.append([value_row(0)]))
        path.rename(away)
        async with asyncio.timeout(60):
            while journal.problem is None:
                await asyncio.sleep(0.005)
            assert "journal was taken away" in journal.problem
            late = journal.append([value_row(1)])
            away.rename(path)
            while journal.problem is not None:
                await asyncio.sleep(0.005)
        await journal.committed(late)
        journal.close()

    asyncio.run(main())
    store = open_store(path)
    assert names_of(store) == ["v0", "v1"]
    store.close()


def test_what_a_failed_write_left_in_the_log_is_no_change_by_others(tmp_path: Path) -> None:
    store = open_store(tmp_path / "journal")
    store.limit_pages(1200)
    size = log_of(tmp_path / "journal").stat().st_size
    with pytest.raises(sqlite3.Error, match="full"):
        store.append([value_row(number, 20_000) for number in range(300)])
    assert log_of(tmp_path / "journal").stat().st_size > size
    store.limit_pages(0)
    store.append([value_row(9)])
    assert names_of(store) == ["v9"]
    store.close()


def killed(path: Path, copy: Path) -> None:
    """Three rows that were committed, and files as a killed manager leaves them."""
    store = open_store(path)
    for number in range(3):
        store.append([value_row(number)])
    for suffix in ("", "-wal", "-mark"):
        Path(f"{copy}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    store.close()


@pytest.mark.parametrize(
    "damage", [DAMAGES["its log deleted"], DAMAGES["its log emptied"], DAMAGES["its log overwritten"]]
)
def test_a_start_notices_that_committed_rows_are_missing(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    path = tmp_path / "copy" / "journal"
    path.parent.mkdir()
    killed(tmp_path / "journal", path)
    damage(path)
    log = log_of(path).read_bytes() if log_of(path).exists() else b""
    for _ in range(2):  # a second try changes nothing
        with pytest.raises(JournalError, match=RESTART):
            open_store(path)
    assert not log or Path(f"{path}-wal.refused").read_bytes() == log
    Path(f"{path}-mark").unlink()
    store = open_store(path)
    assert names_of(store) == []
    store.close()


def test_a_journal_that_is_gone_is_no_new_one(tmp_path: Path) -> None:
    killed(tmp_path / "first", tmp_path / "journal")
    for suffix in ("", "-wal"):
        Path(f"{tmp_path / 'journal'}{suffix}").unlink()
    with pytest.raises(JournalError, match=RESTART):
        open_store(tmp_path / "journal")


def test_the_last_rows_may_be_missing_after_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed(tmp_path / "first", tmp_path / "journal")
    log = log_of(tmp_path / "journal")
    os.truncate(log, log.stat().st_size - 100)
    (tmp_path / "boot").write_text("00000000-another-start-of-the-machine")
    monkeypatch.setattr(journal_files, "_BOOT_ID", tmp_path / "boot")
    store = open_store(tmp_path / "journal")
    assert names_of(store) == ["v0", "v1"]
    assert "rows 3 to 3, which were committed, are missing; the machine was started anew" in caplog.text
    store.close()


def test_rows_that_were_deleted_on_purpose_are_not_missing(tmp_path: Path) -> None:
    for _ in range(2):
        store = open_store(tmp_path / "journal")
        store.append([value_row(0), value_row(1)])
        store.purge([1])
        store.close()
    store = open_store(tmp_path / "journal")
    assert store.next_lsn == 5
    store.close()


def test_a_disk_that_takes_nothing_is_noticed_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.02)
    is_full = True
    probe = JournalStore.probe

    def probed(store: JournalStore) -> None:
        if is_full:
            raise sqlite3.OperationalError("database or disk is full")
        probe(store)

    monkeypatch.setattr(JournalStore, "probe", probed)

    async def main() -> None:
        nonlocal is_full
        journal = Journal.open(tmp_path / "journal", about=ABOUT)
        journal.start()
        async with asyncio.timeout(60):
            while journal.problem is None:
                await asyncio.sleep(0.005)
            is_full = False
            while journal.problem is not None:
                await asyncio.sleep(0.005)
        journal.close()

    asyncio.run(main())


def test_a_start_with_sessions_to_delete_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.02)
    store = open_store(tmp_path / "journal")
    store.append([Row(1, Kind.OPEN, "gone"), Row(1, Kind.CLOSE, ""), Row(2, Kind.OPEN, "stays")])
    store.close()

    def refused(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def main() -> None:
        journal = Journal.open(tmp_path / "journal", about=ABOUT)
        with monkeypatch.context() as full:
            for method in ("probe", "purge", "append"):
                full.setattr(JournalStore, method, refused)
            assert [rows[0].name for rows in journal.recover()] == ["stays"]
            journal.start()
            async with asyncio.timeout(60):
                while journal.problem is None:
                    await asyncio.sleep(0.005)
        async with asyncio.timeout(60):
            while journal.problem is not None:
                await asyncio.sleep(0.005)
            while journal._store.closed_sessions():
                await asyncio.sleep(0.05)
        journal.close()

    asyncio.run(main())
    store = open_store(tmp_path / "journal")
    assert names_of(store) == ["stays"]
    store.close()


def test_a_mark_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "journal-mark").mkdir()
    store = open_store(tmp_path / "journal")
    for number in range(3):
        store.append([value_row(number)])
    assert names_of(store) == ["v0", "v1", "v2"]
    assert caplog.text.count("journal-mark cannot be written") == 1
    store.close()
