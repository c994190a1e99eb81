"""Sessions of the front end: what travels together, in which order, and what ends when."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import parrot as P
from frontend_stub import StubService, flush, stub_connection, wait_until
from parrot.errors import PromptTooLong, SessionClosed, SessionNotFound, UpstreamFailed
from parrot.frontend import session, submission


@pytest.fixture
def service() -> Iterator[StubService]:
    with stub_connection() as stub:
        yield stub


@P.function
def step(text):
    """{{input:text}} {{output:next}}"""


@P.function
def other(text):
    """{{input:text}} {{output}}"""


def fail_after(_: object) -> None:
    raise ZeroDivisionError


def test_the_first_submit_creates_the_session(service: StubService) -> None:
    step("a").get()
    step("b").get()
    first, second = service.submits
    assert (first.create_session, second.create_session) == (True, False)
    assert first.session_id == second.session_id


def test_calls_go_out_by_themselves_soon_after_they_are_made() -> None:
    with stub_connection(flush_s=0.002) as service:
        text = "a"
        for _ in range(3):
            text = step(text)
        wait_until(lambda: len(service.calls) == 3)
        assert not service.gets


def test_calls_that_are_made_at_once_go_out_together(service: StubService) -> None:
    text = "a"
    for _ in range(3):
        text = step(text)
    assert not service.submits
    flush(text)
    wait_until(lambda: service.submits)
    assert [len(submit.calls) for submit in service.submits] == [3]


def test_a_batch_holds_calls_back_until_it_ends() -> None:
    with stub_connection(flush_s=0.002) as service:
        with P.batch():
            step("a")
            with P.batch():
                time.sleep(0.02)
            time.sleep(0.02)
            step("b")
            assert not service.submits
        wait_until(lambda: service.submits)  # by itself
    assert [len(submit.calls) for submit in service.submits] == [2]


def test_a_get_that_follows_a_batch_goes_with_it(service: StubService) -> None:
    with P.batch():
        first, second = step("a"), step("b")
    assert not service.submits
    second.get(perf=P.THROUGHPUT)
    assert [(label.semantic_var_id, label.criteria) for label in service.submits[0].labels] == [
        (second.id, "THROUGHPUT")
    ]
    first.get()
    assert [len(submit.calls) for submit in service.submits] == [2]


def test_a_get_inside_a_batch_sends_what_waits(service: StubService) -> None:
    with P.batch():
        assert step("a").get() == "step.next"
        later = step("b")
    later.get()
    assert [len(submit.calls) for submit in service.submits] == [1, 1]


def test_a_get_leaves_beside_its_submit(service: StubService) -> None:
    service.answers_wait_for_gets = True
    assert step("a").get(timeout=60) == "step.next"
    assert [get.submit_id for get in service.gets] == [service.submits[0].submit_id]
    assert service.num_requests == 2


def test_a_get_whose_submit_was_answered_names_none(service: StubService) -> None:
    pending = step("a")
    flush(pending)
    assert pending.submission is not None
    pending.submission.sent.result(60)
    pending.get()
    assert [get.submit_id for get in service.gets] == [None]


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_the_error_of_a_submit_wins_over_that_of_its_get(service: StubService, timeout: float | None) -> None:
    """The get would be held until its time is over, long after the submit was refused."""
    service.submits_wait_for_gets = True
    service.refusal = PromptTooLong("9000 tokens exceed 8192")
    begin = time.monotonic()
    with pytest.raises(PromptTooLong, match="'step' did not start: 9000 tokens"):
        step("a").get(timeout=timeout)
    assert time.monotonic() - begin < 15
    assert len(service.gets) == 1


def test_a_get_that_failed_before_its_submit_asks_again(
    service: StubService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_POLL_S", 0.05)
    service.submit_pause_s = 0.3
    assert step("a").get(perf=P.THROUGHPUT) == "step.next"
    early, late = service.gets
    assert (early.submit_id, late.submit_id) == (service.submits[0].submit_id, None)
    assert early.criteria == late.criteria == "THROUGHPUT"  # the first one may not have said it to anybody


def test_a_get_that_does_not_wait_asks_when_its_submit_was_answered(service: StubService) -> None:
    assert step("a").done()
    assert [get.submit_id for get in service.gets] == [None]


def test_an_error_inside_a_batch_ends_it(service: StubService) -> None:
    with pytest.raises(ZeroDivisionError), P.batch():
        fail_after(step("a"))
    assert step("b").get() == "step.next"
    assert [len(submit.calls) for submit in service.submits] == [2]


def test_a_refused_submit_surfaces_at_the_get_and_names_the_function(service: StubService) -> None:
    service.refusal = PromptTooLong("9000 tokens exceed 8192")
    mine, theirs = step("a"), other("b")
    with pytest.raises(PromptTooLong, match="'step' did not start: 9000 tokens"):
        mine.get()
    with pytest.raises(PromptTooLong, match="'other' did not start"):
        theirs.get()
    assert mine.done()
    service.refusal = None
    assert step("a").get() == "step.next"
    assert service.submits[0].create_session  # under a new id: the refused submit may have left the old one


def test_a_call_on_a_refused_variable_names_the_cause(service: StubService) -> None:
    service.refusal = PromptTooLong("9000 tokens exceed 8192")
    lost = step("a")
    flush(lost)
    wait_until(lambda: lost.submission.sent.done())
    service.refusal = None
    with pytest.raises(UpstreamFailed, match="9000 tokens") as error:
        other(lost).get()
    assert [cause.code for cause in error.value.causes] == ["prompt_too_long"]


def test_submits_of_a_session_arrive_in_order(service: StubService) -> None:
    service.round_trip_s = 0.03
    text = "a"
    for _ in range(5):
        text = step(text)
        flush(text)
    assert text.get() == "step.next"
    assert len(service.submits) == 5
    seen: set[str] = set()
    for call in service.calls:
        text_hole, next_hole = call.placeholders
        assert text_hole.value == "a" or text_hole.semantic_var_id in seen
        seen.add(next_hole.semantic_var_id or "")


def test_a_submit_that_grows_too_large_is_split(
    service: StubService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "MAX_CALLS", 10)
    with P.batch():
        last = [step("a") for _ in range(25)][-1]
    last.get()
    assert [len(submit.calls) for submit in service.submits] == [10, 10, 5]
    monkeypatch.setattr(submission, "MAX_CHARS", 1000)
    P.map(step, ["x" * 600] * 4)[-1].get()
    assert [len(submit.calls) for submit in service.submits[3:]] == [2, 2]


def test_a_session_ends_with_its_block(service: StubService) -> None:
    service.held.add("step")
    with P.session() as session:
        done = other("b").get()
        pending = step("a")
    assert done == "other.output"
    with pytest.raises(SessionClosed, match="closed before this was submitted"):
        pending.get()
    with pytest.raises(SessionClosed, match="make calls inside"):
        other(pending)
    wait_until(lambda: service.deleted == [session.id])
    assert other("c").get() == "other.output"
    assert len(service.sessions) == 2


def test_a_session_that_sent_nothing_is_not_deleted(service: StubService) -> None:
    with P.session():
        pass
    step("a").get()
    assert not service.deleted


def test_nested_sessions_are_separate(service: StubService) -> None:
    with P.session() as outer:
        step("a").get()
        with P.session() as inner:
            step("b").get()
        step("c").get()
    assert [submit.session_id for submit in service.submits] == [outer.id, inner.id, outer.id]


def test_a_connection_inside_a_session_has_its_own(service: StubService) -> None:
    with P.session() as session:
        with stub_connection() as inner:
            step("a").get()
        assert len(inner.submits) == 1
        step("b").get()
    assert [submit.session_id for submit in service.submits] == [session.id]


def test_a_session_ends_when_its_block_raises(service: StubService) -> None:
    with contextlib.suppress(ZeroDivisionError), P.session() as session:
        step("a").get()
        _ = 1 // 0
    wait_until(lambda: service.deleted == [session.id])


def test_a_variable_carries_its_session_into_other_threads(service: StubService) -> None:
    with P.session() as session, ThreadPoolExecutor(4) as pool:
        first = step("a")
        results = list(pool.map(lambda _: other(first).get(), range(8)))
    assert results == ["other.output"] * 8
    assert {submit.session_id for submit in service.submits} == {session.id}


def test_an_expired_default_session_is_replaced(service: StubService) -> None:
    old = step("a")
    old.get()
    expired = service.submits[0].session_id
    service.sessions.clear()
    service.submits_wait_for_gets = True
    begin = time.monotonic()
    assert step("b").get() == "step.next"
    assert time.monotonic() - begin < 15  # the get in the old session is given up
    assert service.submits[1].create_session
    assert service.submits[1].session_id != expired
    assert [get.session_id for get in service.gets[1:]] == [expired, service.submits[1].session_id]
    service.sessions.clear()
    with pytest.raises(SessionNotFound):
        step(old).get()


def test_many_threads_may_use_one_session(service: StubService) -> None:
    barrier = threading.Barrier(8)

    def work(number: int) -> str:
        barrier.wait()
        text = step(str(number))
        for _ in range(10):
            text = step(text)
        return str(text.get())

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(8))) == {"step.next"}
    assert len(service.calls) == 88
    assert sum(submit.create_session for submit in service.submits) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_session_of_its_own(service: StubService) -> None:
    step("a").get()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.write(write, step("b").get(timeout=60).encode())
            os.write(write, str(len(service.sessions)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"step.next2"
    os.close(read)
    os.close(write)
    assert step("c").get() == "step.next"
