"""The journal: many requests by one commit, and a disk that is full, damaged, or somebody else's."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from parrot.errors import JournalError, JournalUnavailable
from parrot.manager import journal as journal_module
from parrot.manager.journal import Journal
from parrot.manager.journal_store import JournalStore, Kind, Row

ABOUT = {"tokenizer": "t"}


def value_row(number: int, size: int = 10) -> Row:
    return Row(1, Kind.VALUE, f"v{number}", b"x" * size)


def open_store(path: Path) -> JournalStore:
    return JournalStore.open(path, about=ABOUT)


def rows_of(store: JournalStore) -> list[Row]:
    return [row for rows in store.sessions() for row in rows]


def run(path: Path, scenario: Callable[[Journal], Awaitable[None]]) -> None:
    async def main() -> None:
        journal = Journal.open(path, about=ABOUT)
        journal.start()
        try:
            await scenario(journal)
        finally:
            journal.close()

    asyncio.run(main())


# --- the file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 200])
def test_rows_come_back_in_order(tmp_path: Path, num_rows: int) -> None:
    store = open_store(tmp_path / "journal")
    rows = [Row(1, Kind.OUTPUT, f"v{i}", b"a\0" * i, bytes([i % 256])) for i in range(num_rows)]
    store.append(rows)
    store.append([Row(1, Kind.LABEL, "last", b"LATENCY")])
    store.close()
    store = open_store(tmp_path / "journal")
    assert rows_of(store) == [*rows, Row(1, Kind.LABEL, "last", b"LATENCY")]
    store.close()


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "journal")
    store.append([value_row(0)])
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "journal": 0o600,
        "journal-wal": 0o600,
        "journal-mark": 0o600,
    }
    store.close()


def test_a_second_manager_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    store = open_store(tmp_path / "journal")
    with pytest.raises(JournalError, match=r"in use by another manager; stop that one, or name another"):
        open_store(tmp_path / "journal")
    store.close()
    open_store(tmp_path / "journal").close()


def test_a_second_manager_that_is_refused_does_not_keep_the_first_from_writing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    open_store(path).close()
    os.utime(path, ns=(1, 1))  # however coarse the clock of files is, a write now is seen
    store = open_store(path)
    with pytest.raises(JournalError, match="in use by another manager"):
        open_store(path)
    assert path.stat().st_mtime_ns == 1
    store.check_files()
    store.append([value_row(0)])
    store.check_files()
    store.close()


def test_what_a_torn_end_held_is_not_there_and_what_came_before_is(tmp_path: Path) -> None:
    path, torn = tmp_path / "journal", tmp_path / "torn"
    store = open_store(path)
    for number in range(3):
        store.append([value_row(2 * number), value_row(2 * number + 1)])
    shutil.copy(path, torn)
    log = Path(f"{path}-wal").read_bytes()
    Path(f"{torn}-wal").write_bytes(log[:-100])
    store.close()
    store = open_store(torn)
    assert [row.name for row in rows_of(store)] == ["v0", "v1", "v2", "v3"]
    store.append([value_row(9)])
    assert len(rows_of(store)) == 5
    store.close()


def test_a_flipped_bit_in_a_value_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    store = open_store(path)
    store.append([value_row(0), Row(1, Kind.VALUE, "v1", b"the true value")])
    store.close()
    path.write_bytes(path.read_bytes().replace(b"the true value", b"the trve value"))
    journal = Journal.open(path, about=ABOUT)
    with pytest.raises(JournalError, match=r"is damaged \(row 2 is not .*move it away to start without"):
        list(journal.recover())
    journal.close()


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 8176])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=r"is damaged .*restore a copy of it, or move it away"):
        open_store(path)
    assert path.read_bytes() == content


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE important (x)")
    with pytest.raises(JournalError, match="a database of something else; name another file"):
        open_store(path)


def test_a_journal_of_another_version_or_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    open_store(path).close()
    with pytest.raises(JournalError, match="was written with tokenizer t, this service has other"):
        JournalStore.open(path, about={"tokenizer": "other"})
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA user_version = 99")
    with pytest.raises(JournalError, match="has schema version 99, this version of Parrot reads 1"):
        open_store(path)


def test_a_file_that_cannot_be_made_names_what_helps(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be opened; name a file in a directory that exists"):
        open_store(tmp_path / "missing" / "journal")


def test_a_purged_session_gives_its_room_to_others(tmp_path: Path) -> None:
    store = open_store(tmp_path / "journal")
    for number in range(1, 20):
        store.append([Row(number, Kind.VALUE, "v", b"x" * 50_000)])
        store.purge([number])
    assert rows_of(store) == []
    assert store.num_bytes() < 100_000
    store.close()
    assert (tmp_path / "journal").stat().st_size < 200_000


# --- the writer --------------------------------------------------------------------------------------------


def test_one_commit_serves_all_who_wait(tmp_path: Path) -> None:
    async def scenario(journal: Journal) -> None:
        tickets = [journal.append([value_row(i)]) for i in range(500)]
        await asyncio.gather(*map(journal.committed, reversed(tickets)))
        assert journal.num_commits < 100
        await journal.committed(tickets[0])  # long ago

    run(tmp_path / "journal", scenario)
    store = open_store(tmp_path / "journal")
    assert [row.name for row in rows_of(store)] == [f"v{i}" for i in range(500)]
    store.close()


def test_nobody_is_answered_before_the_commit(tmp_path: Path) -> None:
    async def scenario(journal: Journal) -> None:
        for number in range(20):
            await journal.committed(journal.append([value_row(number)]))
            copy = tmp_path / f"copy{number}"
            for suffix in ("", "-wal"):
                shutil.copy(f"{tmp_path / 'journal'}{suffix}", f"{copy}{suffix}")
            store = open_store(copy)
            assert len(rows_of(store)) == number + 1
            store.close()

    run(tmp_path / "journal", scenario)


def test_big_events_are_spread_over_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_MAX_BYTES", 1000)

    async def scenario(journal: Journal) -> None:
        for number in range(20):
            journal.append([value_row(number, 400)])
        await journal.committed(journal.last_ticket)
        assert journal.num_commits >= 6

    run(tmp_path / "journal", scenario)


def test_a_full_disk_is_a_typed_error_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.02)

    async def scenario(journal: Journal) -> None:
        await journal.committed(journal.append([value_row(0)]))
        journal._store.limit_pages(16)
        with pytest.raises(JournalUnavailable, match=r"cannot keep .*database or disk is full"):
            await journal.committed(journal.append([value_row(1, 200_000)]))
        with pytest.raises(JournalUnavailable):
            journal.check()
        late = journal.append([value_row(2)])  # what runs on may still end
        with pytest.raises(JournalUnavailable):
            await journal.committed(late)
        journal._store.limit_pages(0)
        async with asyncio.timeout(60):
            while journal.problem is not None:
                await asyncio.sleep(0.005)
        await journal.committed(late)

    run(tmp_path / "journal", scenario)
    store = open_store(tmp_path / "journal")
    assert [row.name for row in rows_of(store)] == ["v0", "v1", "v2"]
    store.close()


def test_a_disk_that_stays_full_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async def scenario(journal: Journal) -> None:
        journal._store.limit_pages(1)
        with pytest.raises(JournalUnavailable):
            await journal.committed(journal.append([value_row(1, 200_000)]))

    run(tmp_path / "journal", scenario)


def test_closed_sessions_are_deleted_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.02)
    purges: list[int] = []
    purge = JournalStore.purge

    def counted(store: JournalStore, sessions: list[int]) -> None:
        purges.append(len(sessions))
        purge(store, sessions)

    monkeypatch.setattr(JournalStore, "purge", counted)

    async def scenario(journal: Journal) -> None:
        for number in range(1, 101):
            journal.append([Row(number, Kind.OPEN, f"s{number}"), Row(number, Kind.CLOSE, "")])
        async with asyncio.timeout(60):
            while sum(purges) < 100:
                await asyncio.sleep(0.005)

    run(tmp_path / "journal", scenario)
    assert len(purges) < 20
    store = open_store(tmp_path / "journal")
    assert rows_of(store) == []
    store.close()


def test_a_thread_that_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(journal: Journal) -> None:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(journal, "_take", fail)

        async def commit_some() -> None:
            for number in range(3):  # the first ones may still be taken
                await asyncio.wait_for(journal.committed(journal.append([value_row(number)])), 60)

        with pytest.raises(JournalUnavailable, match="its thread has ended"):
            await commit_some()
        assert journal.problem is not None

    run(tmp_path / "journal", scenario)
