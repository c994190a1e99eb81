"""What strangers may send before they are asked for a key, and how much of bodies is held."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from app_harness import check_error, run
from auth_harness import Door
from auth_harness import run as run_with_keys
from manager_harness import Manager, until
from parrot.manager import body_limit, http_protocol

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /v1/submit HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED += b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"


async def answer(client: httpx.AsyncClient, *pieces: bytes) -> tuple[int, str]:
    """Status and message of the answer to these bytes, which must end the connection; 0: no answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    reply = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 5)
        async with asyncio.timeout(5):
            while received := await reader.read(65536):
                reply += received
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        writer.close()
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
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(_: Manager, client: httpx.AsyncClient) -> None:
        for _attempt in range(20):
            assert await answer(client, b"nonsense\r\n\r\n") == (400, "this is not HTTP")
        upgrade = {"Connection": "Upgrade", "Upgrade": "h2c"}
        for _attempt in range(5):
            assert (await client.get("/health", headers=upgrade)).status_code == 200

    http_protocol._Notes.next_s = 0.0
    with caplog.at_level(logging.INFO):
        run(tiny_model, scenario)
    assert len([record for record in caplog.records if "refused" in record.getMessage()]) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", (0, "")),
        (b"\r\n", (408, "the headers did not arrive within 0.1 s")),
        (HEAD + b"X: ", (408, "the headers did not arrive within 0.1 s")),
        (CHUNKED, (408, "the body did not arrive within 0.1 s")),
        (CHUNKED + b"0\r\nX: ", (408, "the body did not arrive within 0.1 s")),
    ],
)
def test_what_does_not_arrive_is_given_up(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, expected: tuple[int, str]
) -> None:
    monkeypatch.setattr(http_protocol, "_WINDOW_S", 0.1)

    async def scenario(_: Manager, client: httpx.AsyncClient) -> None:
        assert await answer(client, sent) == expected

    run(tiny_model, scenario)


def test_a_long_wait_for_an_answer_and_a_slow_large_body_are_no_such_thing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_WINDOW_S", 0.2)
    monkeypatch.setattr(http_protocol, "_MIN_BODY_BYTES", 1)

    async def slowly() -> AsyncIterator[bytes]:
        for piece in (b"{", b" ", b" ", b'"nothing": 1}'):
            yield piece
            await asyncio.sleep(0.1)

    async def scenario(_: Manager, client: httpx.AsyncClient) -> None:
        json_type = {"content-type": "application/json"}
        check_error(
            await client.post("/v1/submit", content=slowly(), headers=json_type), 400, "invalid_request"
        )
        session = (await client.post("/v1/session")).json()["session_id"]
        variables = [{"semantic_var_id": "x"}]
        submit = {"session_id": session, "variables": variables}
        assert (await client.post("/v1/submit", json=submit)).status_code == 200
        get = {"session_id": session, "semantic_var_id": "x", "timeout_ms": 500}
        assert (await client.post("/v1/get", json=get)).json()["status"] == "pending"

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
