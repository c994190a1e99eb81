"""A manager killed at any point comes back with what was on record: nothing lost, nothing changed."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graph_builder import SESSION_ID, body, finish, flow_call, join, prompt_call, value, write
from parrot import api, wire
from parrot.config import ManagerConfig
from parrot.errors import DuplicateRequest, EngineError, ErrorInfo, JournalError, ParrotError
from parrot.manager.call import Call, CallState
from parrot.manager.clock import now_us
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

    def restore(self, session: Session, changes: Changes) -> None:
        self.changes[session.session_id] = changes

    def turn(self) -> None:
        pass


class Service:
    """Sessions with a journal, as a manager has them."""

    def __init__(self, journal: SyncJournal, keys: KeyFile | None = None) -> None:
        self.journal = journal
        self.keys = keys
        self.table = SessionTable(CONFIG, Tenants(keys), journal=cast(Journal, journal))
        self.resumed = Resumed()
        recover(cast(Journal, journal), self.table, cast(Executor, self.resumed))

    def after_a_kill(self) -> Service:
        return Service(self.journal.killed(), self.keys)

    @property
    def graphs(self) -> dict[str, Graph]:
        return {name: session.graph for name, session in self.table._sessions.items()}


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(SyncJournal(tmp_path / "journal"))


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


def test_values_and_unfinished_calls_are_there_after_a_kill(service: Service) -> None:
    session = service.table.create()
    graph = session.graph
    calls = [flow_call("A", ["x"], ["y"]), flow_call("B", ["y"], ["z"]), flow_call("C", ["never"], ["w"])]
    variables = [value("x", "text"), value("never"), join("both", "y", "z")]
    graph.add(body(*calls, variables=variables, labels={"z": "LATENCY"}), now_us=0)
    finish(graph, "A", "first")
    back = service.after_a_kill()
    again = back.graphs[session.session_id]
    assert view(again) == view(graph)
    assert again.variables["y"].value == "first"
    changes = back.resumed.changes[session.session_id]
    assert [call.request_id for call in changes.ready] == ["B"]
    finish(again, "B", "second")
    assert again.variables["both"].value == "first\nsecond"
    third = back.after_a_kill()
    assert third.graphs[session.session_id].variables["both"].value == "first\nsecond"


def test_ids_that_the_service_chose_stay(service: Service) -> None:
    session = service.table.create()
    holes = [{"name": name, "kind": "output"} for name in ("out", "more")]
    call = api.CallBody.model_validate(
        {"prompt": "{{output:more}} and {{output:out}}", "placeholders": holes}
    )
    taken = session.graph.add(body(call), now_us=0).calls[0]
    again = service.after_a_kill().graphs[session.session_id]
    assert {name: output.variable.id for name, output in again.live[taken.request_id].outputs.items()} == {
        name: output.variable.id for name, output in taken.outputs.items()
    }


def test_a_call_goes_on_behind_the_outputs_that_it_had_written(service: Service) -> None:
    """Its second output continues the ids of the first, not another text that would be sampled now."""
    session = service.table.create()
    call = prompt_call("A", "{{output:x}} then {{output:y}}", write("x", transforms=[{"op": "strip"}]))
    session.graph.add(body(call), now_us=0)
    live = session.graph.live["A"]
    live.dispatch("engine-0")
    session.graph.complete(live, 0, " one ", wire.pack_ids([5, 6]))
    again = service.after_a_kill().graphs[session.session_id]
    resumed = again.live["A"]
    assert (again.variables["x"].value, resumed.next_step) == ("one", 1)
    written = resumed.steps[0].output.binding
    assert (written.raw, written.token_ids) == (" one ", wire.pack_ids([5, 6]))
    assert [step.index for step in resumed.ready_steps()] == [1]


def test_log_probabilities_of_a_finished_output_are_kept(service: Service) -> None:
    session = service.table.create()
    session.graph.add(body(flow_call("A", [], ["x"])), now_us=0)
    logprobs = wire.Logprobs(0, b"\1\0\0\0", b"\0\0\0\0", b"", b"")
    session.graph.live["A"].outputs["x"].logprobs = logprobs
    finish(session.graph, "A", "text")
    again = service.after_a_kill().graphs[session.session_id]
    assert again.calls[next(iter(again.calls))].outputs["x"].logprobs == logprobs


def test_text_that_is_no_valid_unicode_comes_back_as_it_was(service: Service) -> None:
    session = service.table.create()
    session.graph.add(body(flow_call("A", [], ["x"])), now_us=0)
    finish(session.graph, "A", "half \ud83d of a pair, \0 and \U0001f600")
    again = service.after_a_kill().graphs[session.session_id]
    assert again.variables["x"].value == "half \ud83d of a pair, \0 and \U0001f600"


def test_errors_come_back_with_their_causes(service: Service) -> None:
    session = service.table.create()
    graph = session.graph
    graph.add(body(flow_call("A", [], ["x"]), flow_call("B", ["x"], ["y"])), now_us=0)
    graph.fail(graph.live["A"], EngineError("it broke").to_info())
    again = service.after_a_kill().graphs[session.session_id]
    assert view(again) == view(graph)
    error = again.variables["y"].error
    assert error is not None
    assert (error.code, [cause.message for cause in error.causes]) == ("upstream_failed", ["it broke"])


def test_what_a_cancellation_stopped_further_up_stays_stopped(service: Service) -> None:
    session = service.table.create()
    graph = session.graph
    graph.add(body(flow_call("A", [], ["x"]), flow_call("B", ["x"], ["y"])), now_us=0)
    graph.cancel("y")
    back = service.after_a_kill()
    assert view(back.graphs[session.session_id]) == view(graph)
    assert not back.graphs[session.session_id].live


def test_a_request_id_that_came_again_is_no_duplicate_after_a_kill(service: Service) -> None:
    session = service.table.create()
    session.graph.add(body(flow_call("A", [], ["x"])), now_us=0)
    finish(session.graph, "A", "text")
    session.graph.add(body(flow_call("A", [], ["y"])), now_us=0)
    again = service.after_a_kill().graphs[session.session_id]
    assert [call.state for call in again.calls.values()] == [CallState.DONE, CallState.QUEUED]
    assert again.live["A"].outputs["y"].variable.pending
    with pytest.raises(DuplicateRequest):
        again.add(body(flow_call("A", [], ["z"])), now_us=0)


def test_a_closed_session_leaves_nothing(service: Service) -> None:
    gone, kept = service.table.create(), service.table.create()
    for session in (gone, kept):
        session.graph.add(body(flow_call("A", [], ["x"])), now_us=0)
    service.table.remove(gone.session_id)
    back = service.after_a_kill()
    assert list(back.graphs) == [kept.session_id]
    assert [rows[0].name for rows in back.journal.store.sessions()] == [kept.session_id]
    new = back.table.create()
    assert set(back.after_a_kill().graphs) == {kept.session_id, new.session_id}


def test_a_session_stays_its_tenants(tmp_path: Path) -> None:
    service = Service(SyncJournal(tmp_path / "journal"), KeyFile())
    for tenant in ("mine", "other"):
        session = service.table.create(SESSION_ID, tenant=tenant)
        session.graph.add(body(variables=[value("x", tenant)]), now_us=0)
    back = service.after_a_kill()
    for tenant in ("mine", "other"):
        assert back.table.get(SESSION_ID, tenant=tenant).graph.variables["x"].value == tenant
    assert back.table.find(SESSION_ID, tenant="third") is None


def test_a_deadline_counts_on_while_no_manager_runs(service: Service) -> None:
    session = service.table.create()
    graph = session.graph
    graph.add(body(flow_call("A", [], ["x"]), flow_call("B", [], ["y"])), now_us=0)
    now = now_us()
    graph.label("x", "DEADLINE", target_ms=60_000, now_us=now)
    again = service.after_a_kill().graphs[session.session_id]
    demand = again.variables["x"].demand
    assert demand is not None
    assert demand.expires_us is not None
    assert abs(demand.expires_us - (now + 60_000_000)) < 1_000_000
    assert again.expire(now + 61_000_000).ended == [again.calls[next(iter(again.calls))]]
    assert again.variables["y"].pending


def test_a_session_that_cannot_be_rebuilt_is_named_with_what_helps(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = service.table.create()
    session.graph.add(body(flow_call("A", ["x"], ["y"]), variables=[value("x", "long" * 10)]), now_us=0)
    monkeypatch.setattr("test_recovery.CONFIG", ManagerConfig(max_value_bytes=20))
    with pytest.raises(JournalError, match=rf"{session.session_id}.*limit of 20 bytes.*move it away"):
        service.after_a_kill()


TRANSFORMS = [[], [{"op": "strip"}], [{"op": "split", "separator": ","}, {"op": "item", "index": 1}]]
TEXTS = st.sampled_from(["", " a ", "a,b", "c"])


class KilledAtAnyPoint(RuleBasedStateMachine):
    """The graph in memory is what the one that comes back must equal; values that were told must not
    change."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.service = Service(SyncJournal(Path(self.directory.name, "journal")))
        self.numbers = itertools.count()
        self.told: dict[tuple[str, str], str | ErrorInfo] = {}

    def teardown(self) -> None:
        self.service.journal.store.close()
        self.directory.cleanup()

    def pick(self, data: st.DataObject) -> Graph:
        return self.service.graphs[data.draw(st.sampled_from(sorted(self.service.graphs)))]

    has_session = precondition(lambda self: self.service.graphs)

    @rule()
    def open(self) -> None:
        if len(self.service.graphs) < 3:
            self.service.table.create(f"s-{next(self.numbers):032x}")

    @has_session
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        graph = self.pick(data)
        self.service.table.remove(graph.session_id)
        graph.close(ErrorInfo("session_closed", "it was deleted"))
        self.told = {key: end for key, end in self.told.items() if key[0] != graph.session_id}

    @has_session
    @rule(data=st.data(), num_calls=st.integers(1, 3), named=st.booleans())
    def submit(self, data: st.DataObject, num_calls: int, named: bool) -> None:
        graph = self.pick(data)
        known, calls = sorted(graph.variables), []
        new = f"v{next(self.numbers)}"
        text = data.draw(st.none() | TEXTS)
        variables = [value(new, text)]
        known.append(new)
        if text is None and len(known) > 1:
            sources = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=2))
            derived = f"d{next(self.numbers)}"
            variables.append(join(derived, *sources, transforms=data.draw(st.sampled_from(TRANSFORMS))))
            known.append(derived)
        for _ in range(num_calls):
            calls.append(self.draw_call(data, known))
        labels: dict[str, api.Criteria] = {}
        if data.draw(st.booleans()):
            labels[data.draw(st.sampled_from(known))] = "LATENCY"
        submitted = body(*calls, variables=variables, labels=labels)
        if named:
            submitted = submitted.model_copy(update={"submit_id": f"s{next(self.numbers)}"})
        self.attempt(lambda: graph.add(submitted, now_us=0))

    def draw_call(self, data: st.DataObject, known: list[str]) -> api.CallBody:
        inputs = data.draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
        outputs = [f"o{next(self.numbers)}" for _ in range(data.draw(st.integers(1, 2)))]
        holes = [f"{{{{input:{name}}}}}" for name in inputs[:1]]
        holes += [f"{{{{output:{outputs[0]}}}}}"] + [f"{{{{input:{name}}}}}" for name in inputs[1:]]
        holes += [f"{{{{output:{name}}}}}" for name in outputs[1:]]
        chains = [write(name, transforms=data.draw(st.sampled_from(TRANSFORMS))) for name in outputs]
        known += outputs
        name = data.draw(st.sampled_from(["f", "g", "h", "i", "j"]))
        return prompt_call(name, " ".join(holes), *chains)

    @has_session
    @rule(data=st.data(), text=TEXTS)
    def set_value(self, data: st.DataObject, text: str) -> None:
        graph = self.pick(data)
        if graph.variables:
            name = data.draw(st.sampled_from(sorted(graph.variables)))
            self.attempt(lambda: graph.set_value(name, text))

    @has_session
    @rule(data=st.data(), text=TEXTS)
    def complete(self, data: st.DataObject, text: str) -> None:
        graph = self.pick(data)
        ready = [name for name, call in graph.live.items() if call.ready_steps()]
        if ready:
            call = graph.live[data.draw(st.sampled_from(ready))]
            if call.next_step == call.num_dispatched:
                call.dispatch("engine-0")
            graph.complete(call, call.next_step, text, wire.pack_ids([call.next_step]))

    @has_session
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        graph = self.pick(data)
        if graph.live:
            call = graph.live[data.draw(st.sampled_from(sorted(graph.live)))]
            graph.fail(call, ErrorInfo("engine_error", "it broke"))

    @has_session
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        graph = self.pick(data)
        if graph.variables:
            graph.cancel(data.draw(st.sampled_from(sorted(graph.variables))))

    @has_session
    @rule(data=st.data(), criteria=st.sampled_from(["LATENCY", "THROUGHPUT"]))
    def label(self, data: st.DataObject, criteria: api.Criteria) -> None:
        graph = self.pick(data)
        if graph.variables:
            graph.label(data.draw(st.sampled_from(sorted(graph.variables))), criteria)

    @rule()
    def kill(self) -> None:
        before = {name: view(graph) for name, graph in self.service.graphs.items()}
        self.service = self.service.after_a_kill()
        assert {name: view(graph) for name, graph in self.service.graphs.items()} == before

    @staticmethod
    def attempt(event: Any) -> None:
        with contextlib.suppress(ParrotError):
            event()

    @invariant()
    def what_was_told_stays(self) -> None:
        for name, graph in self.service.graphs.items():
            for variable in graph.variables.values():
                end = variable.error if variable.value is None else variable.value
                if end is not None:
                    assert self.told.setdefault((name, variable.id), end) == end
        known = {(name, var_id) for name, graph in self.service.graphs.items() for var_id in graph.variables}
        assert set(self.told) <= known


TestKilledAtAnyPoint = KilledAtAnyPoint.TestCase
TestKilledAtAnyPoint.settings = settings(max_examples=25, stateful_step_count=30)
