"""What strangers may send before they are asked for a key, and how much of bodies is held."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

import manager_harness
from app_harness import check_error, run
from auth_harness import Door
from auth_harness import run as run_with_keys
from manager_harness import Manager, until
from parrot.manager import body_limit, http_protocol

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /v1/submit HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED += b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"


class Steered(http_protocol.GuardedProtocol):
    """A connection whose windows pass when the test says so; real ones are longer than any test."""

    made: ClassVar[list[Steered]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_received = 0
        self.made.append(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.num_received += len(data)

    def pass_window(self) -> None:
        """As much time as a window has goes by, if one is open."""
        if self._window is not None:
            self._window.cancel()
            self._window_ended()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Steered]:
    """The connections that are made to a manager, in their order."""
    monkeypatch.setattr(manager_harness, "GuardedProtocol", Steered)
    monkeypatch.setattr(http_protocol, "_WINDOW_S", 3600.0)
    monkeypatch.setattr(Steered, "made", [])
    return Steered.made


async def answer(
    client: httpx.AsyncClient, *pieces: bytes, sent: Callable[[], Awaitable[None]] | None = None
) -> tuple[int, str]:
    """Status and message of the answer to these bytes, which must end the connection; 0: no answer.

    On a bare socket: a stream would forget an answer that is here already when a reset comes behind it.
    ``sent`` runs when all of the pieces are.
    """
    loop = asyncio.get_running_loop()
    reply = b""
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0)) as connection:
        connection.setblocking(False)
        async with asyncio.timeout(60):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for piece in pieces:
                    await loop.sock_sendall(connection, piece)
            if sent is not None:
                await sent()
            with contextlib.suppress(ConnectionResetError):
                while received := await loop.sock_recv(connection, 65536):
                    reply += received
    if not reply:
        return 0, ""
    head, _, body = reply.rpartition(b"\r\n\r\n")
    fields = json.loads(body) if b"json" in head else {}
    return int(reply.split()[1]), fields.get("error", {}).get("message", "")


def test_headers_are_bounded_in_bytes_and_number(tiny_model: Path) -> None:
    async def scenario(_: Manager, client: httpx.AsyncClient) -> None:
        headers = [b"X-%d: a\r\n" % index for index in range(101)]
        long = b"X: " + b"a" * 70_000 + b"\r\n\r\n"
        for pieces in (
            [HEAD, *headers, b"\r\n"],
            [HEAD, long],
            [HEAD + long],
            [b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"],
        ):
            assert (await answer(client, *pieces))[0] == 431
        piece = b"a" * 2**16
        for begin in (HEAD + b"X: ", b"GET /", CHUNKED + b"0\r\nX: ", CHUNKED + b"2;", HEAD + b"X"):
            status, _message = await answer(client, begin, *[piece] * 64)
            assert status in (0, 400, 401, 431), begin[-10:]  # closed; a reset may overtake the answer
        fine = HEAD + b"".join(headers[:98]) + b"Y: " + b"a" * 60_000 + b"\r\nConnection: close\r\n\r\n"
        assert (await answer(client, fine.replace(headers[97], b"")))[0] == 200

    run(tiny_model, scenario)


def test_what_is_no_http_is_a_json_body_and_one_line_a_minute(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(_: Manager, client: httpx.AsyncClient) -> None:
        for _attempt in range(20):
            assert await answer(client, b"nonsense\r\n\r\n") == (400, "this is not HTTP")
        upgrade = {"Connection": "Upgrade", "Upgrade": "h2c"}
        for _attempt in range(5):
            assert (await client.get("/health", headers=upgrade)).status_code == 200

    monkeypatch.setattr(http_protocol, "_LOG_EVERY_S", 3600.0)
    monkeypatch.setattr(http_protocol._Notes, "next_s", 0.0)
    with caplog.at_level(logging.INFO):
        run(tiny_model, scenario)
    assert len([record for record in caplog.records if "refused" in record.getMessage()]) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", (0, "")),
        (b"\r\n", (408, "the headers did not arrive within 3600 s")),
        (HEAD + b"X: ", (408, "the headers did not arrive within 3600 s")),
        (CHUNKED, (408, "the body did not arrive within 3600 s")),
        (CHUNKED + b"0\r\nX: ", (408, "the body did not arrive within 3600 s")),
    ],
)
def test_what_does_not_arrive_is_given_up(
    tiny_model: Path, connections: list[Steered], sent: bytes, expected: tuple[int, str]
) -> None:
    async def scenario(_: Manager, client: httpx.AsyncClient) -> None:
        async def pass_window() -> None:
            await until(lambda: bool(connections) and connections[0].num_received == len(sent))
            connections[0].pass_window()

        assert await answer(client, sent, sent=pass_window) == expected

    run(tiny_model, scenario)


def test_a_window_passes_by_itself(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_WINDOW_S", 0.05)

    async def scenario(_: Manager, client: httpx.AsyncClient) -> None:
        assert await answer(client) == (0, "")

    run(tiny_model, scenario)


def test_a_slow_large_body_arrives_while_each_window_brings_enough_of_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, connections: list[Steered]
) -> None:
    monkeypatch.setattr(http_protocol, "_MIN_BODY_BYTES", 3)

    async def slowly() -> AsyncIterator[bytes]:
        """Each piece arrives just within its window."""
        await until(lambda: bool(connections) and connections[0]._is_in_body)
        for piece in (b"{  ", b"   ", b"   ", b'"nothing": 1'):
            yield piece
            await until(lambda: connections[0]._body_bytes >= 3)
            connections[0].pass_window()
            assert connections[0]._body_bytes == 0
        yield b"}"

    async def scenario(_: Manager, client: httpx.AsyncClient) -> None:
        headers = {"content-type": "application/json"}
        reply = await client.post("/v1/submit", content=slowly(), headers=headers)
        check_error(reply, 400, "invalid_request")

    run(tiny_model, scenario)


def test_a_long_wait_for_an_answer_is_no_slow_request(tiny_model: Path, connections: list[Steered]) -> None:
    async def scenario(_: Manager, client: httpx.AsyncClient) -> None:
        session = (await client.post("/v1/session")).json()["session_id"]
        submit = {"session_id": session, "variables": [{"semantic_var_id": "x"}]}
        assert (await client.post("/v1/submit", json=submit)).status_code == 200
        [connection] = connections
        num_before = connection.num_received
        get = {"session_id": session, "semantic_var_id": "x", "timeout_ms": 300}
        waiting = asyncio.create_task(client.post("/v1/get", json=get))
        await until(lambda: connection.num_received > num_before and not connection._is_in_body)
        connection.pass_window()
        assert (await waiting).json()["status"] == "pending"

    run(tiny_model, scenario)


@asynccontextmanager
async def half_sent(url: str, key: str, num_bytes: int) -> AsyncIterator[asyncio.StreamReader]:
    """A connection of which this much of a body is sent, and not more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    head = f"POST /v1/submit HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {num_bytes + 1}\r\n\r\n"
    writer.write(head.encode() + b" " * num_bytes)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()


def test_all_bodies_together_are_bounded_and_those_of_one_tenant_to_half(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_limit, "MAX_HELD_BYTES", 400_000)
    limits: list[body_limit.BodyLimit] = []
    made = body_limit.BodyLimit.__init__

    def remembered(self: body_limit.BodyLimit, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)  # type: ignore[arg-type]
        limits.append(self)

    monkeypatch.setattr(body_limit.BodyLimit, "__init__", remembered)

    async def scenario(door: Door) -> None:
        await door.session("a")
        large, small = {"padding": "x" * 150_000}, {"padding": "x" * 1000}
        async with half_sent(door.url, door.keys["a"], 120_000) as first:
            await until(lambda: limits[0]._num_held == 120_000)
            refused = await door.post("a", "/v1/submit", **large)
            check_error(refused, 503, "unavailable")
            assert refused.headers["retry-after"] == "1"
            assert (await door.post("a", "/v1/submit", **small)).status_code == 400
            assert (await door.post("b", "/v1/submit", **large)).status_code == 400
            assert not first.at_eof()
        await until(lambda: limits[0]._num_held == 0 and not limits[0]._held)
        assert (await door.post("a", "/v1/submit", **large)).status_code == 400

    run_with_keys(tiny_model, tmp_path / "keys.json", scenario)
