"""A service whose journal commits at once, and what is to come back from it after a kill."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from parrot.config import ManagerConfig
from parrot.manager.call import Call, CallState
from parrot.manager.executor import Executor
from parrot.manager.flow import Changes
from parrot.manager.graph import Graph
from parrot.manager.journal import Journal
from parrot.manager.journal_store import JournalStore, Row
from parrot.manager.key_file import KeyFile
from parrot.manager.recovery import recover
from parrot.manager.session import Session, SessionTable
from parrot.manager.tenants import Tenants

CONFIG = ManagerConfig()


class SyncJournal:
    """A journal that commits at once, in this thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = JournalStore.open(path, about={"tokenizer": "t"})
        self.store._connection.execute("PRAGMA synchronous = OFF")  # fsync is most of the time, and no matter
        self._next_session = self.store.next_session
        self._num_events = 0

    def new_session(self) -> int:
        self._next_session += 1
        return self._next_session - 1

    def append(self, event: Sequence[Row]) -> int:
        self.store.append(event)
        self._num_events += 1
        return self._num_events

    def recover(self) -> Iterator[list[Row]]:
        self.store.purge(self.store.closed_sessions())
        yield from self.store.sessions()

    def killed(self) -> SyncJournal:
        """The journal as the next manager finds it if this one is killed now."""
        found = self.path.with_name(f"{self.path.name}+")
        for suffix in ("", "-wal"):
            shutil.copy(f"{self.path}{suffix}", f"{found}{suffix}")
        self.store.close()
        return SyncJournal(found)


class Resumed:
    """Stands for the executor: what it was told to run on."""

    def __init__(self) -> None:
        self.changes: dict[str, Changes] = {}

    def restoring(self, session: Session, changes: Changes) -> Iterator[None]:
        self.changes[session.session_id] = changes
        yield

    def turn(self) -> None:
        pass


class Service:
    """Sessions with a journal, as a manager has them."""

    def __init__(self, journal: SyncJournal, keys: KeyFile | None = None) -> None:
        self.journal = journal
        self.keys = keys
        self.table = SessionTable(CONFIG, Tenants(keys), journal=cast(Journal, journal))
        self.resumed = Resumed()
        asyncio.run(recover(cast(Journal, journal), self.table, cast(Executor, self.resumed)))

    def after_a_kill(self) -> Service:
        return Service(self.journal.killed(), self.keys)

    @property
    def graphs(self) -> dict[str, Graph]:
        return {name: session.graph for name, session in self.table._sessions.items()}


def view(graph: Graph) -> dict[str, Any]:
    """All of a graph that a client or an engine can notice."""
    return {
        "variables": {one.id: (one.state, one.value, one.error, one.criteria) for one in _variables(graph)},
        "calls": [_call_view(call) for call in graph.calls.values()],
        "live": {name: call.request_id for name, call in graph.live.items()},
        "submits": {name: [call.request_id for call in calls] for name, calls in graph.submits.items()},
    }


def _variables(graph: Graph) -> list[Any]:
    return sorted(graph.variables.values(), key=lambda variable: variable.id)


def _call_view(call: Call) -> tuple[Any, ...]:
    outputs = {name: output.variable.id for name, output in call.outputs.items()}
    if call.ended:
        return (call.request_id, outputs, call.state, call.error)
    is_ready = call.state in (CallState.QUEUED, CallState.RUNNING)
    texts = {name: binding.text for name, binding in call.inputs.items()}
    written = [(step.output.binding.raw, step.output.binding.token_ids) for step in call.steps]
    return (call.request_id, outputs, is_ready, call.next_step, texts, written[: call.next_step])
