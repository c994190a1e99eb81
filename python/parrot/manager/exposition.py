"""Prometheus' text format: families of samples as lines (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from .call_counts import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "parrot_"

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


def gauge(name: str, text: str, samples: Iterable[Sample]) -> str:
    """Values that go up and down."""
    return _family(name, "gauge", text, samples)


def counter(name: str, text: str, samples: Iterable[Sample]) -> str:
    """Values that only grow; ``_total`` is added to the name."""
    return _family(f"{name}_total", "counter", text, samples)


def by_label(label: str, values: Mapping[str, float]) -> list[Sample]:
    """One sample per key."""
    return [({label: key}, value) for key, value in values.items()]


def histogram(name: str, text: str, series: Iterable[tuple[Labels, Histogram]]) -> str:
    """Buckets, sum and count of each series."""
    lines = [_head(name, "histogram", text)]
    for labels, values in series:
        ends = [*(f"{bound:g}" for bound in values.bounds), "+Inf"]
        for end, number in zip(ends, accumulate(values.counts), strict=True):
            lines.append(_line(f"{name}_bucket", {**labels, "le": end}, number))
        lines.append(_line(f"{name}_sum", labels, values.total))
        lines.append(_line(f"{name}_count", labels, sum(values.counts)))
    return "".join(lines)


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> str:
    return _head(name, kind, text) + "".join(_line(name, labels, value) for labels, value in samples)


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {_PREFIX}{name} {text}\n# TYPE {_PREFIX}{name} {kind}\n"


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    number = int(value) if value == int(value) else repr(float(value))
    return f"{_PREFIX}{name}{{{inside}}} {number}\n" if inside else f"{_PREFIX}{name} {number}\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
