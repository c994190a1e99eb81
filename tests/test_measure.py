"""Measured runs: which calls belong to one, and where the network is drawn."""

from __future__ import annotations

import pytest

from parrot.api import CallsReply, CallView
from parrot.cli import measure
from parrot.cli.measure import Run, to_track, wait_for_calls
from test_timeline import make_call


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[CallView]:
    """What the service lists as ended; one more call appears with every request."""
    calls: list[CallView] = []
    shown = iter(range(1, 100))

    def fetch(_url: str) -> bytes:
        return CallsReply(calls=tuple(calls[: next(shown)])).model_dump_json().encode()

    monkeypatch.setattr(measure, "_fetch", fetch)
    return calls


def test_calls_of_earlier_runs_are_left_out_and_late_ones_waited_for(listed: list[CallView]) -> None:
    listed += [make_call("old", 5, 5, 6, 7, 8)]
    listed += [make_call("second", 100, 300, 310, 320, 330), make_call("first", 100, 110, 120, 130, 140)]
    calls = wait_for_calls("http://service", since_us=50, count=2)
    assert [call.function for call in calls] == ["first", "second"], "in the order in which they became ready"


def test_calls_that_do_not_appear_do_not_hang(
    listed: list[CallView], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_SETTLE_S", 0.05)
    assert wait_for_calls("http://service", since_us=0, count=1) == ()


def test_runnable_time_is_from_the_first_ready_to_the_last_finished() -> None:
    calls = (make_call("a", 0, 10, 20, 30, 40), make_call("b", 0, 5, 41, 50, 95))
    run = Run(("x", "y"), 0, 200, calls, 2)
    assert run.runnable_us == 90
    assert run.makespan_s == pytest.approx(200e-6)


@pytest.mark.parametrize(("one_trip", "count"), [(True, 2), (False, 6)])
def test_the_round_trip_is_drawn_once_or_around_every_call(one_trip: bool, count: int) -> None:
    calls = tuple(make_call(f"c{i}", 100, 100, 110, 120, 130 + i) for i in range(3))
    track = to_track(Run(("",) * 3, 0, 300, calls, 3), "way", "note", rtt_us=80, one_trip=one_trip)
    phases = [phase for trips in track.trips.values() for phase in trips]
    assert len(phases) == count
    assert {phase.end_us - phase.begin_us for phase in phases} == {40}


def test_no_network_is_drawn_without_a_round_trip() -> None:
    run = Run(("",), 0, 30, (make_call("c", 0, 1, 2, 3, 4),), 1)
    assert not any(to_track(run, "way", "note", rtt_us=0, one_trip=False).trips.values())
