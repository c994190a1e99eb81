"""What a graph tells its journal: every submit it took, and how every variable ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from ..api import Criteria, SubmitBody
from ..errors import ErrorInfo
from ..wire import Logprobs
from .call import Call, OutputBinding
from .journal_store import Kind, Row
from .variable import Variable

if TYPE_CHECKING:
    from .journal import Journal


class Recorder(Protocol):
    """Told by a graph, after the fact and in order. What a submit says itself is not told again."""

    def submitted(self, body: SubmitBody, calls: Sequence[Call]) -> None:
        """A submit was taken."""

    def ended(self, variables: Sequence[Variable], output: OutputBinding | None) -> None:
        """These variables have their values or errors; what an engine wrote for ``output`` is needed
        beyond that."""

    def labelled(self, var_id: str, criteria: Criteria, target_ms: float | None) -> None:
        """A get asks more of a variable than was asked before."""


class ChosenIds(msgspec.Struct, frozen=True, array_like=True):
    """The ids that the service gave a call where its client had not: its own, and by name its outputs'."""

    request_id: str
    outputs: dict[str, str]


class Label(msgspec.Struct, frozen=True, array_like=True):
    """What a get asked, and when, in microseconds of the wall clock."""

    criteria: Criteria
    target_ms: float | None
    asked_us: int


class Generated(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a generated text beyond itself."""

    token_ids: bytes
    logprobs: Logprobs | None


_encode = msgspec.msgpack.Encoder().encode


class SessionRecorder:
    """Puts what happens in one session into the journal. ``ticket`` is that of its newest row."""

    __slots__ = ("_first", "_journal", "_number", "ticket")

    def __init__(self, journal: Journal, number: int | None = None) -> None:
        """``number``: of a session that the journal knows; else it is a new one."""
        self._journal = journal
        self._number = journal.new_session() if number is None else number
        self._first: Row | None = None
        self.ticket = 0

    async def committed(self) -> None:
        """Wait until all of this is on record; see :meth:`Journal.committed`."""
        await self._journal.committed(self.ticket)

    def opened(self, session_id: str, tenant: str, *, by_submit: bool) -> None:
        """The first row of a session. ``by_submit``: it is on record together with what comes next, or not
        at all, so that a submit that makes its session can come again after a kill at any moment."""
        first = self._row(Kind.OPEN, session_id, tenant.encode())
        if by_submit:
            self._first = first
        else:
            self.ticket = self._journal.append([first])

    def closed(self) -> None:
        """The last row: everything of the session may be deleted."""
        if self._first is None:
            self._append(Kind.CLOSE, "")

    def submitted(self, body: SubmitBody, calls: Sequence[Call]) -> None:
        """See :class:`Recorder`."""
        ids = [
            ChosenIds(call.request_id, {name: output.variable.id for name, output in call.outputs.items()})
            for call in calls
        ]
        when = str(_wall_us())
        self._append(Kind.SUBMIT, when, body.to_json(), _encode(ids))

    def ended(self, variables: Sequence[Variable], output: OutputBinding | None) -> None:
        """See :class:`Recorder`."""
        rows = [self._end(variable) for variable in variables]
        if output is not None:
            extra = _encode(Generated(output.token_ids, output.logprobs))
            rows.append(self._row(Kind.OUTPUT, output.variable.id, encode_text(output.raw or ""), extra))
        if rows:
            self._append_rows(rows)

    def labelled(self, var_id: str, criteria: Criteria, target_ms: float | None) -> None:
        """See :class:`Recorder`."""
        self._append(Kind.LABEL, var_id, msgspec.json.encode(Label(criteria, target_ms, _wall_us())))

    def _end(self, variable: Variable) -> Row:
        if variable.error is not None:
            return self._row(Kind.ERROR, variable.id, msgspec.json.encode(variable.error))
        return self._row(Kind.VALUE, variable.id, encode_text(variable.value or ""))

    def _row(self, kind: Kind, name: str, data: bytes = b"", extra: bytes = b"") -> Row:
        return Row(self._number, kind, name, data, extra)

    def _append(self, kind: Kind, name: str, data: bytes = b"", extra: bytes = b"") -> None:
        self._append_rows([self._row(kind, name, data, extra)])

    def _append_rows(self, rows: list[Row]) -> None:
        if self._first is not None:
            rows = [self._first, *rows]
            self._first = None
        self.ticket = self._journal.append(rows)


def _wall_us() -> int:
    """What the next manager's clock can be compared with."""
    return time.time_ns() // 1000


def encode_text(text: str) -> bytes:
    """UTF-8; half surrogate pairs, which a JSON path can find in generated text, stay what they are."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """Inverse of :func:`encode_text`."""
    return data.decode("utf-8", "surrogatepass")


decode_ids = msgspec.msgpack.Decoder(list[ChosenIds]).decode
decode_generated = msgspec.msgpack.Decoder(Generated).decode
decode_error = msgspec.json.Decoder(ErrorInfo).decode
decode_label = msgspec.json.Decoder(Label).decode
