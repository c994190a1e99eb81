"""One call outside any declared graph, as the OpenAI routes make them, and its text while it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from .. import wire
from .call import Call
from .logprobs import num_ids, skip
from .session import Session
from .variable import Variable


@dataclass(frozen=True, slots=True)
class Piece:
    """More text of one of the calls of a request, with the log-probabilities of the ids that it completes."""

    index: int
    text: str
    logprobs: wire.Logprobs | None


@dataclass(frozen=True, slots=True)
class End:
    """One of the calls of a request is done, failed or cancelled."""

    index: int


Pieces = asyncio.Queue[Piece | End]


class SingleCall:
    """A one-call session. ``index`` is its place among the calls of a request, which share ``pieces``.
    ``finish_reason`` and ``logprobs`` are there once the call is done."""

    call: Call
    variable: Variable

    def __init__(self, session: Session, pieces: Pieces, *, index: int, stream: bool) -> None:
        self.session = session
        self.stream = stream
        self.index = index
        self.finish_reason: wire.FinishReason = "stop"
        self.logprobs: wire.Logprobs | None = None
        self.prompt_logprobs: wire.Logprobs | None = None
        self._pieces = pieces
        self._num_sent = 0
        self._num_received = 0  # of the present run: after an engine's loss the text comes anew
        self._ids_sent = 0
        self._ids_received = 0

    def attach(self, call: Call) -> None:
        """This is the call."""
        self.call = call
        self.variable = call.steps[0].output.binding.variable

    def restarted(self) -> None:
        """The call runs again from its beginning; what was sent already is not sent again."""
        self._num_received = self._ids_received = 0

    def received(self, text: str, logprobs: wire.Logprobs | None = None) -> None:
        """More text is final."""
        new = text[max(self._num_sent - self._num_received, 0) :]
        self._num_received += len(text)
        self._num_sent += len(new)
        known = max(self._ids_sent - self._ids_received, 0)
        self._ids_received += num_ids(logprobs)
        if logprobs is not None:
            logprobs = skip(logprobs, known)
            self._ids_sent += num_ids(logprobs)
        if new or num_ids(logprobs):
            self._pieces.put_nowait(Piece(self.index, new, logprobs))

    def generated(self, done: wire.GenerateDone) -> None:
        """The whole text is there."""
        self.finish_reason, self.logprobs = done.finish_reason, done.logprobs
        self.prompt_logprobs = done.prompt_logprobs
        self.restarted()
        self.received(done.text, done.logprobs)

    def ended(self) -> None:
        """The call is done, failed or cancelled."""
        self._pieces.put_nowait(End(self.index))


async def pieces_of(singles: Sequence[SingleCall], pieces: Pieces) -> AsyncIterator[Piece | End]:
    """Text of the calls as it comes, until all have ended; raises the error of one that failed."""
    num_open = len(singles)
    while num_open:
        piece = await pieces.get()
        if isinstance(piece, End):
            num_open -= 1
            singles[piece.index].variable.result()
        yield piece
