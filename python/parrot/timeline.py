"""A picture of where calls spent their time: one lane per call, as a self-contained SVG.

The data are :class:`~parrot.api.CallView` of ``GET /v1/calls``; all times are microseconds of one clock.
Several tracks (two ways to run one application, say) are drawn under each other on the same scale.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape

from .api import CallView

Kind = Literal["network", "waiting", "queue", "prefill", "decode"]
LEGEND: tuple[tuple[Kind, str], ...] = (
    ("network", "network to the client"),
    ("waiting", "inputs not there yet"),
    ("queue", "queue"),
    ("prefill", "prefill"),
    ("decode", "decode"),
)

_WIDTH = 1120
_LABEL_WIDTH = 170
_NOTE_WIDTH = 250
_PLOT_WIDTH = _WIDTH - _LABEL_WIDTH - _NOTE_WIDTH
_LANE_HEIGHT = 20
_BAR_HEIGHT = 12
_THIN_HEIGHT = 6
_HEADER_HEIGHT = 76
_TITLE_HEIGHT = 44
_AXIS_HEIGHT = 40

_STYLE = """
svg { --ink: #24292f; --soft: #6b7480; --line: #e4e7eb; --paper: #ffffff; --queue: #a9b1bc;
  --prefill: #e3a33f; --decode: #3f7fc1; --network: #c77d98; --waiting: #b4bbc5; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6e8eb; --soft: #98a1ad; --line: #2c3138; --paper: #17191d; --queue: #6a7380;
    --prefill: #d8a04a; --decode: #5b9bdc; --network: #c98aa1; --waiting: #59616c; } }
text { font: 12px system-ui, 'DejaVu Sans', sans-serif; fill: var(--ink); }
.title { font-size: 17px; font-weight: 600; } .track { font-size: 14px; font-weight: 600; }
.soft { fill: var(--soft); } .num { text-anchor: middle; } .end { text-anchor: end; }
.paper { fill: var(--paper); } .grid { stroke: var(--line); }
.finish { stroke: var(--ink); stroke-dasharray: 3 3; }
.queue { fill: var(--queue); } .prefill { fill: var(--prefill); } .decode { fill: var(--decode); }
.waiting { fill: var(--waiting); } .network { fill: var(--network); }
"""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a call's life, ``[begin_us, end_us)``."""

    kind: Kind
    begin_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class Track:
    """Calls of one run, drawn from ``begin_us`` (the client starts) to ``end_us`` (it has the answer).

    ``trips`` are round-trip halves by ``request_id``: time that a call, or the answer it led to, spent on the
    network between client and service.
    """

    title: str
    note: str
    calls: tuple[CallView, ...]
    begin_us: int
    end_us: int
    trips: dict[str, tuple[Phase, ...]]


def call_phases(call: CallView) -> list[Phase]:
    """The phases of a call in order; empty ones and those that never began are left out."""
    timing = call.timing
    stamps: tuple[tuple[Kind, int | None, int | None], ...] = (
        ("waiting", timing.submitted_us, timing.ready_us),
        ("queue", timing.ready_us, timing.admitted_us),
        ("prefill", timing.admitted_us, timing.first_token_us),
        ("decode", timing.first_token_us, timing.finished_us),
    )
    phases: list[Phase] = []
    for kind, begin, end in stamps:
        if begin is not None and end is not None and end > begin:
            phases.append(Phase(kind, begin, end))
    return phases


def call_labels(calls: Sequence[CallView]) -> list[str]:
    """The function of each call, numbered where it occurs more than once."""
    names = [call.function or "completion" for call in calls]
    totals, seen = Counter(names), Counter[str]()
    labels = []
    for name in names:
        seen[name] += 1
        labels.append(f"{name} {seen[name]}" if totals[name] > 1 else name)
    return labels


def tick_step_s(span_s: float, max_ticks: int = 12) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts ``span_s`` into at most ``max_ticks`` parts."""
    rough = max(span_s, 1e-6) / max_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)


def render_svg(title: str, tracks: Sequence[Track]) -> str:
    """The whole picture as SVG text; it follows the reader's light or dark colour scheme."""
    span_us = max(max(track.end_us - track.begin_us for track in tracks), 1)
    body: list[str] = []
    y = _HEADER_HEIGHT
    for track in tracks:
        body.extend(_draw_track(track, y, span_us))
        y += _TITLE_HEIGHT + _LANE_HEIGHT * len(track.calls) + _AXIS_HEIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}">'
        f"<style>{_STYLE}</style>"
        f'<rect class="paper" width="{_WIDTH}" height="{y}"/>'
        f'<text class="title" x="20" y="30">{escape(title)}</text>'
    )
    return "\n".join([head, *_draw_legend(), *body, "</svg>\n"])


def _draw_legend() -> Iterator[str]:
    x = 20.0
    for kind, label in LEGEND:
        yield _bar(kind, x, 44, 22)
        yield f'<text class="soft" x="{x + 28:g}" y="{54}">{label}</text>'
        x += 28 + 6.6 * len(label) + 26


def _draw_track(track: Track, top: int, span_us: int) -> Iterator[str]:
    def x_of(time_us: int) -> float:
        return _LABEL_WIDTH + (time_us - track.begin_us) / span_us * _PLOT_WIDTH

    took_s = (track.end_us - track.begin_us) / 1e6
    lanes_top = top + _TITLE_HEIGHT
    lanes_bottom = lanes_top + _LANE_HEIGHT * len(track.calls)
    yield f'<text class="track" x="20" y="{top + 16}">{escape(track.title)}: {took_s:.2f} s</text>'
    yield f'<text class="soft" x="20" y="{top + 34}">{escape(track.note)}</text>'
    yield from _draw_axis(lanes_top, lanes_bottom, span_us)
    for index, (call, label) in enumerate(zip(track.calls, call_labels(track.calls), strict=True)):
        y = lanes_top + index * _LANE_HEIGHT
        baseline = y + 14
        yield f'<text class="end" x="{_LABEL_WIDTH - 10}" y="{baseline}">{escape(label)}</text>'
        for phase in (*track.trips.get(call.request_id, ()), *call_phases(call)):
            begin, end = x_of(phase.begin_us), x_of(phase.end_us)
            tip = f"{label}: {phase.kind} {(phase.end_us - phase.begin_us) / 1000:.0f} ms"
            yield _bar(phase.kind, begin, y + 4, max(end - begin, 0.8), tip)
        note_x = _LABEL_WIDTH + _PLOT_WIDTH + 14
        yield f'<text class="soft" x="{note_x}" y="{baseline}">{escape(_call_note(call))}</text>'
    x = f"{x_of(track.end_us):.1f}"
    yield f'<line class="finish" x1="{x}" x2="{x}" y1="{lanes_top - 4}" y2="{lanes_bottom}"/>'


def _draw_axis(top: int, bottom: int, span_us: int) -> Iterator[str]:
    span_s = span_us / 1e6
    step = tick_step_s(span_s)
    for index in range(int(span_s / step + 1e-9) + 1):
        x = _LABEL_WIDTH + index * step / span_s * _PLOT_WIDTH
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom + 4}"/>'
        yield f'<text class="soft num" x="{x:.1f}" y="{bottom + 19}">{index * step:g} s</text>'


def _bar(kind: Kind, x: float, y: float, width: float, tip: str = "") -> str:
    """A rectangle; time in which nothing happens for the call is drawn thin."""
    height = _THIN_HEIGHT if kind in ("waiting", "network") else _BAR_HEIGHT
    top = y + (_BAR_HEIGHT - height) / 2
    hover = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{top:g}" width="{width:.1f}" height="{height}">{hover}</rect>'
    )


def _call_note(call: CallView) -> str:
    if call.state != "done":
        return call.state
    cached = f" ({call.cached_tokens} cached)" if call.cached_tokens else ""
    return f"{call.engine}: {call.prompt_tokens} in{cached}, {call.output_tokens} out"
