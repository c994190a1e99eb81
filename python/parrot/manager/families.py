"""Metric families of the manager: the library's, with the manager's prefix, from rows.

A row is the values of a family's labels, in their order, and the number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric

from .call_counts import Histogram

_PREFIX = "parrot_"

Row = tuple[Sequence[str], float]


def gauge(name: str, text: str, rows: Iterable[Row], *labels: str) -> Metric:
    """Values that go up and down."""
    family = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def counter(name: str, text: str, rows: Iterable[Row], *labels: str) -> Metric:
    """Values that only grow; ``_total`` is added to the name."""
    family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def histogram(name: str, text: str, rows: Iterable[tuple[Sequence[str], Histogram]], *labels: str) -> Metric:
    """Buckets, sum and count of each series; the ends of buckets are written as floats, as OpenMetrics
    wants them."""
    family = HistogramMetricFamily(_PREFIX + name, text, labels=labels)
    for values, observed in rows:
        ends = [*(str(float(bound)) for bound in observed.bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(observed.counts), strict=True))
        family.add_metric(values, buckets, observed.total)
    return family


def info(name: str, text: str, **said: str) -> Metric:
    """What does not change, as labels; ``_info`` is added to the name."""
    return InfoMetricFamily(_PREFIX + name, text, said)


def single(number: float) -> list[Row]:
    """The row of a family without labels."""
    return [((), number)]


def keyed(numbers: Mapping[str, float]) -> list[Row]:
    """A row per key, of a family with one label."""
    return [((key,), number) for key, number in numbers.items()]
