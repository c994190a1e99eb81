"""The SVG timeline: lanes, phases and scale, read back from the drawing."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from parrot.api import CallTiming, CallView
from parrot.timeline import Phase, Track, call_phases, render_svg, tick_step_s

SVG = "{http://www.w3.org/2000/svg}"


def make_call(name: str, *stamps: int | None, state: str = "done") -> CallView:
    """Stamps in microseconds: submitted, ready, admitted, first token, finished."""
    submitted, ready, admitted, first, finished = stamps
    assert submitted is not None
    timing = CallTiming(
        submitted_us=submitted,
        ready_us=ready,
        dispatched_us=ready,
        admitted_us=admitted,
        first_token_us=first,
        finished_us=finished,
    )
    return CallView(
        request_id=f"r-{name}",
        session_id="s-0",
        function=name,
        state=state,  # type: ignore[arg-type]
        objective="THROUGHPUT",
        engine="engine-0",
        inputs={},
        outputs={},
        prompt_tokens=262,
        cached_tokens=25,
        output_tokens=25,
        timing=timing,
    )


def make_track(*calls: CallView, end_us: int, trips: dict[str, tuple[Phase, ...]] | None = None) -> Track:
    return Track("Parrot", "one round trip", calls, 0, end_us, trips or {})


def bars(svg: str, kind: str) -> list[ET.Element]:
    """Bars of a kind, without the legend's."""
    return [rect for rect in ET.fromstring(svg).iter(f"{SVG}rect") if rect.get("class") == kind and len(rect)]


def test_phases_follow_each_other_without_gap_or_overlap() -> None:
    phases = call_phases(make_call("f", 0, 10, 30, 60, 100))
    assert [(p.kind, p.begin_us, p.end_us) for p in phases] == [
        ("waiting", 0, 10),
        ("queue", 10, 30),
        ("prefill", 30, 60),
        ("decode", 60, 100),
    ]


def test_a_call_that_never_started_has_no_phase_of_the_engine() -> None:
    assert call_phases(make_call("f", 0, None, None, None, None, state="cancelled")) == []


def test_bars_of_two_tracks_share_one_scale() -> None:
    short = make_track(make_call("f", 0, 0, 0, 0, 1_000_000), end_us=1_000_000)
    long = make_track(make_call("f", 0, 0, 0, 0, 4_000_000), end_us=4_000_000)
    first, second = bars(render_svg("two", [short, long]), "decode")
    assert float(second.get("width", 0)) == pytest.approx(4 * float(first.get("width", 0)), rel=1e-3)


def test_every_call_has_a_lane_with_its_engine_and_tokens() -> None:
    calls = [make_call("step", 0, 0, i, i + 1, i + 9) for i in range(4)] + [make_call("end", 0, 0, 9, 10, 19)]
    svg = render_svg("lanes", [make_track(*calls, end_us=20)])
    texts = [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]
    labels = ["step 1", "step 2", "step 3", "step 4", "end"]
    assert [text for text in texts if text in labels] == labels
    assert texts.count("engine-0: 262 in (25 cached), 25 out") == 5
    assert len({bar.get("y") for bar in bars(svg, "decode")}) == 5


def test_network_time_is_drawn_on_the_lane_of_its_call() -> None:
    call = make_call("f", 100, 100, 100, 200, 300)
    trips = {call.request_id: (Phase("network", 0, 100), Phase("network", 300, 400))}
    svg = render_svg("net", [make_track(call, end_us=400, trips=trips)])
    assert len(bars(svg, "network")) == 2


def test_names_from_outside_are_escaped() -> None:
    svg = render_svg("<t>", [make_track(make_call("</text><script>", 0, 0, 0, 0, 5), end_us=5)])
    assert not list(ET.fromstring(svg).iter(f"{SVG}script"))


@pytest.mark.parametrize("span", [1e-3, 0.7, 3.0, 11.9, 12.0, 99.0, 12345.0])
def test_ticks_are_round_and_few(span: float) -> None:
    step = tick_step_s(span)
    assert span / step <= 12.02
    assert f"{step:e}"[0] in "125"
