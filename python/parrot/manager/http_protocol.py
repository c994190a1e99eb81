"""HTTP connections of strangers: bounded headers, and a time within which what was begun must arrive.

uvicorn's parser (httptools) keeps an unfinished header until it ends, copying it with each piece, and counts
nothing. This is below ASGI, hence before anybody is asked for a key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..errors import InvalidRequest
from .http_errors import error_response

log = logging.getLogger(__name__)
MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 * 2**10  # of the URL and all headers, those behind a chunked body too
_WINDOW_S = 30.0  # for the headers in all; and for each next _MIN_BODY_BYTES
_MIN_BODY_BYTES = 30 * 2**10  # of a body within a window, so that it is not held at a byte a time
_LOG_EVERY_S = 60.0


class GuardedProtocol(HttpToolsProtocol):
    """One connection. What breaks a limit is answered with 431, 408 or 400 in the service's own shape."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal: tuple[int, str] | None = None
        self._num_headers = self._header_bytes = 0
        self._pending_bytes = 0  # fed since something was complete; not 0 once a request has begun
        self._body_bytes = 0  # in this window
        self._is_in_body = False
        self._window: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection that never says anything is closed, too."""
        super().connection_made(transport)
        self._open_window()

    def connection_lost(self, exc: Exception | None) -> None:
        """Also lets go of what has arrived of a body, though somebody may still hold the connection."""
        self._close_window()
        if self.cycle is not None:
            self.cycle.body = bytearray()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; count what belongs to no whole header or piece of a body yet."""
        self._unset_keepalive_if_required()
        if self._refusal is not None:
            return
        self._pending_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # it was answered as a request that asks for no upgrade
        except httptools.HttpParserError:
            self._refuse(*(self._refusal or (400, "this is not HTTP")))
            return
        if self._pending_bytes > MAX_HEADER_BYTES:
            self._refuse(431, _TOO_LONG)
        elif self._pending_bytes == 0 and not self._is_in_body:
            self._close_window()
        elif self._window is None:
            self._open_window()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._close_window()
        self._num_headers = self._header_bytes = 0
        self._pending_bytes = max(1, self._pending_bytes)

    def on_url(self, url: bytes) -> None:
        """A piece of the URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header."""
        self._num_headers += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request starts to run."""
        self._pending_bytes = 0
        self._is_in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._pending_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here."""
        self._pending_bytes = 0
        self._is_in_body = False
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refusal = (431, _TOO_LONG)
        elif self._num_headers > MAX_HEADERS:
            self._refusal = (431, f"more than {MAX_HEADERS} headers")
        else:
            return
        raise ValueError(self._refusal[1])  # ends the parser

    # --- time ----------------------------------------------------------------------------------------------

    def _open_window(self) -> None:
        self._body_bytes = 0
        self._window = self.loop.call_later(_WINDOW_S, self._window_ended)

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None

    def _window_ended(self) -> None:
        self._window = None
        if self.flow.read_paused or (self._is_in_body and self._body_bytes >= _MIN_BODY_BYTES):
            self._open_window()
        elif self._pending_bytes or self._is_in_body:
            part = "body" if self._is_in_body else "headers"
            self._refuse(408, f"the {part} did not arrive within {_WINDOW_S:g} s")
        else:
            self.transport.close()

    # --- refusals ------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close; without an answer if another one is under way here, which it would garble."""
        self._refusal = (status, message)
        self._close_window()
        _note_refusal(self.client, message)
        cycle = self.cycle
        if not self.pipeline and (cycle is None or cycle.response_complete or not cycle.response_started):
            self.transport.write(_answer(status, message))
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.body = bytearray()
            cycle.message_event.set()
        self.pipeline.clear()
        self.transport.close()


_TOO_LONG = f"URL and headers are longer than {MAX_HEADER_BYTES} bytes"


def _answer(status: int, message: str) -> bytes:
    body = bytes(error_response(InvalidRequest(message)).body)
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return STATUS_LINE[status] + head.encode() + body


class _Notes:
    """Anybody can cause these lines: one a minute, with how many there were."""

    num_since = 0
    next_s = 0.0


def _note_refusal(client: tuple[str, int] | None, message: str) -> None:
    _Notes.num_since += 1
    if time.monotonic() >= _Notes.next_s:
        log.info("%d connections refused, the last of %s: %s", _Notes.num_since, client, message)
        _Notes.num_since, _Notes.next_s = 0, time.monotonic() + _LOG_EVERY_S
