"""A page of metrics in the format that was asked for, made in slices of the loop's time.

The library encodes whole registries only. A hundred engines and a thousand tenants take it 50 ms, twice that
in OpenMetrics, so that it is given a few samples at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from copy import copy
from dataclasses import dataclass

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

SAMPLES_AT_A_TIME = 100

Encode = Callable[[Collector], bytes]


@dataclass(frozen=True, slots=True)
class Page:
    """The page and its content type."""

    content: bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class _Given(Collector):
    families: tuple[Metric, ...]

    def collect(self) -> Iterable[Metric]:
        """What was given."""
        return self.families


def scraping(registry: Collector, accept: str = "") -> Generator[None, None, Page]:
    """The page of the registry; ``accept`` is the header of the request. Prometheus' text format unless it
    asks for OpenMetrics. A family is read in one piece, different ones may be some milliseconds apart."""
    encode, content_type = _encoder(accept)
    end = encode(_Given(()))  # what OpenMetrics closes the page with
    pieces: list[bytes] = []
    for family in registry.collect():
        head = encode(_part(family, 0, 0)).removesuffix(end)
        pieces.append(head)
        for first in range(0, len(family.samples), SAMPLES_AT_A_TIME):
            piece = encode(_part(family, first, first + SAMPLES_AT_A_TIME))
            pieces.append(piece.removesuffix(end).removeprefix(head))
            yield
    return Page(b"".join((*pieces, end)), content_type)


def _part(family: Metric, first: int, last: int) -> _Given:
    part = copy(family)
    part.samples = family.samples[first:last]
    return _Given((part,))


def _encoder(accept: str) -> tuple[Encode, str]:
    try:
        return choose_encoder(accept)
    except TypeError:  # it compares versions that are no numbers
        return choose_encoder("")
