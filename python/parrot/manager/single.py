"""One call outside any declared graph, as the OpenAI routes make them, and its text while it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from .. import wire
from .call import Call
from .session import Session
from .variable import Variable


class SingleCall:
    """A one-call session. ``finish_reason`` is there once the call is done."""

    call: Call
    variable: Variable

    def __init__(self, session: Session, *, stream: bool) -> None:
        self.session = session
        self.stream = stream
        self.finish_reason: wire.FinishReason = "stop"
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._num_sent = 0
        self._num_received = 0  # of the present run: after an engine's loss the text comes anew

    def attach(self, call: Call) -> None:
        """This is the call."""
        self.call = call
        self.variable = call.steps[0].output.binding.variable

    def restarted(self) -> None:
        """The call runs again from its beginning; what was sent already is not sent again."""
        self._num_received = 0

    def received(self, text: str) -> None:
        """More text is final."""
        start = self._num_received
        self._num_received += len(text)
        new = text[max(self._num_sent - start, 0) :]
        if new:
            self._num_sent += len(new)
            self._pieces.put_nowait(new)

    def generated(self, done: wire.GenerateDone) -> None:
        """The whole text is there."""
        self.finish_reason = done.finish_reason
        self._num_received = 0
        self.received(done.text)

    def ended(self) -> None:
        """The call is done, failed or cancelled."""
        self._pieces.put_nowait(None)

    async def pieces(self) -> AsyncIterator[str]:
        """Text as it comes, until the call ends; then raises the call's error if it failed."""
        while (piece := await self._pieces.get()) is not None:
            yield piece
        self.variable.result()
