"""A manager killed at any point comes back with what was on record: nothing lost, nothing changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from graph_builder import SESSION_ID, body, finish, flow_call, join, prompt_call, read, value, write
from parrot import api, wire
from parrot.config import ManagerConfig
from parrot.errors import DuplicateRequest, EngineError, JournalError
from parrot.manager.call import CallState
from parrot.manager.clock import now_us
from parrot.manager.key_file import KeyFile
from parrot.manager.value_bytes import size_of
from recovery_harness import Service, SyncJournal, view


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(SyncJournal(tmp_path / "journal"))


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


def test_a_session_that_a_submit_makes_is_on_record_with_it_or_not_at_all(service: Service) -> None:
    """A kill may fall between the two: the submit comes again, and must not find a session without it."""
    service.table.create("mine", by_submit=True)
    back = service.after_a_kill()
    assert not back.graphs
    session = back.table.create("mine", by_submit=True)
    session.graph.add(body(flow_call("A", [], ["x"])), now_us=0)
    again = back.after_a_kill()
    assert view(again.graphs[session.session_id]) == view(session.graph)


def test_a_session_whose_submit_was_refused_leaves_nothing(service: Service) -> None:
    session = service.table.create(by_submit=True)
    service.table.remove(session.session_id)
    back = service.after_a_kill()
    assert not back.graphs
    assert not list(back.journal.store.sessions())


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
    passed_us = now_us() - now
    assert abs(demand.expires_us - (now + 60_000_000)) <= passed_us
    assert again.expire(now + passed_us + 61_000_000).ended == [again.calls[next(iter(again.calls))]]
    assert again.variables["y"].pending


def test_a_session_that_cannot_be_rebuilt_is_named_with_what_helps(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = service.table.create()
    session.graph.add(body(flow_call("A", ["x"], ["y"]), variables=[value("x", "long" * 10)]), now_us=0)
    monkeypatch.setattr("recovery_harness.CONFIG", ManagerConfig(max_value_bytes=20))
    with pytest.raises(JournalError, match=rf"{session.session_id}.*limit of 20 bytes.*move it away"):
        service.after_a_kill()


def test_the_bytes_of_values_that_came_back_are_counted(service: Service) -> None:
    session = service.table.create()
    call = prompt_call("A", "{{input:i}}{{output:x}}", read("i", value="constant"), write("x"))
    given = [value("g", "given"), api.VariableBody(semantic_var_id="s")]
    session.graph.add(body(call, variables=given), now_us=0)
    session.graph.set_value("s", "set later")
    finish(session.graph, "A", "written")
    again = service.after_a_kill().graphs[session.session_id]
    sizes = map(size_of, ("constant", "given", "set later", "written"))
    assert again.values.num_bytes == session.graph.values.num_bytes == sum(sizes)
