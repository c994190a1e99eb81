"""The scheduler's events on record: what it was told and what it decided, so that it can be told again.

A log is a sequence of frames, each a length (4 bytes, little-endian) and a msgpack array. The first holds the
options; every other one an event: its verb, the positional and the named arguments, and for ``schedule`` the
placements. The random key of the prefix hash is not recorded: no decision depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import msgspec
import numpy as np

from .._core import Placement, Scheduler
from ..errors import InvalidRequest

_EVENTS = frozenset(
    {
        "add_engine",
        "remove_engine",
        "set_paused",
        "set_slowdown",
        "set_cost",
        "submit",
        "set_objective",
        "set_tenant_weight",
        "cancel",
        "schedule",
        "finish",
        "add_context",
        "forget_context",
    }
)
_ARRAYS = ("token_ids", "boundaries")
Decision = tuple[int, int, int, int, str, float]


class RecordedScheduler:
    """A scheduler whose events, as far as it accepts them, are written to ``log``; else like the original."""

    def __init__(self, log: BinaryIO, *, hash_key: bytes, **options: Any) -> None:
        self._scheduler = Scheduler(hash_key=hash_key, **options)
        self._log = log
        self._write(["options", [], options, None])

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._scheduler, name)
        return self._recorded(name, verb) if name in _EVENTS else verb

    def _recorded(self, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def act(*positional: Any, **named: Any) -> Any:
            answer = verb(*positional, **named)
            placements = list(map(decision_of, answer)) if name == "schedule" else None
            self._write([name, positional, named, placements])
            return answer

        return act

    def _write(self, event: list[Any]) -> None:
        frame = msgspec.msgpack.encode(event, enc_hook=_as_bytes)
        self._log.write(len(frame).to_bytes(4, "little") + frame)


def decision_of(placement: Placement) -> Decision:
    """A placement as plain values."""
    return (
        placement.call_id,
        placement.engine_id,
        placement.parent_context_id,
        placement.prefix_len,
        placement.reason,
        placement.score_us,
    )


def replay(
    log: BinaryIO, *, hash_key: bytes, **changed: Any
) -> Iterator[tuple[list[Decision], list[Decision]]]:
    """Tell a new scheduler the recorded events, with some options changed; for each ``schedule`` yields the
    recorded decisions and the new ones. Raises :class:`InvalidRequest` for a log that is cut off."""
    events = _read(log)
    _, _, options, _ = next(events)
    scheduler = Scheduler(hash_key=hash_key, **{**options, **changed})
    for name, positional, named, recorded in events:
        for array in _ARRAYS:
            if array in named:
                named[array] = np.frombuffer(named[array], dtype=np.int32)
        answer = getattr(scheduler, name)(*positional, **named)
        if name == "schedule":
            decided = list(map(decision_of, answer))
            yield [tuple(decision) for decision in recorded], decided


def _read(log: BinaryIO) -> Iterator[list[Any]]:
    while header := log.read(4):
        size = int.from_bytes(header, "little")
        frame = log.read(size)
        if len(frame) != size:
            raise InvalidRequest(f"the event log ends within a frame: {len(frame)} bytes of {size}")
        yield msgspec.msgpack.decode(frame)


def _as_bytes(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"an event with a {type(value).__name__} cannot be recorded")
