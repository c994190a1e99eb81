"""The HTTP client: addresses, keys, errors of the network and of the service, and what an import costs."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import parrot as P
from frontend_stub import StubService, stub_connection, wait_until
from parrot.api import GetBody, GetReply
from parrot.errors import (
    InvalidRequest,
    Overloaded,
    ParrotError,
    ServiceStopping,
    ServiceUnreachable,
    Unavailable,
    UpstreamFailed,
)
from parrot.frontend import background
from parrot.frontend import client as client_module
from parrot.frontend.client import Client, is_local

BODY = GetBody(session_id="s-" + "0" * 32, semantic_var_id="v")


@P.function
def ask(text):
    """{{input:text}} {{output}}"""


def post(handler: Callable[[httpx.Request], httpx.Response]) -> GetReply:
    async def where() -> str:
        return "http://stub.test"

    async def run() -> GetReply:
        client = Client(where, transport=httpx.MockTransport(handler))
        try:
            return await client.post("/v1/get", BODY, GetReply)
        finally:
            await client.close()

    return asyncio.run(run())


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nobody_listening_names_the_url_and_the_fix() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    said = rf"{url}.*start one with `parrot serve`"
    with P.connect(url), pytest.raises(ServiceUnreachable, match=said) as caught:
        ask("x").get(timeout=60)
    assert [frame.name for frame in caught.traceback[1:]] == ["get", "wait"]  # none of the background loop


def test_a_connection_that_breaks_is_not_called_refused() -> None:
    def breaks(request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("server disconnected")

    with pytest.raises(ServiceUnreachable, match=r"did not answer /v1/get .server disconnected"):
        post(breaks)


def test_an_error_body_becomes_its_class_with_causes() -> None:
    cause = {"code": "engine_lost", "message": "gone", "type": "EngineLost", "causes": []}
    detail = {
        "code": "upstream_failed",
        "message": "m",
        "type": "UpstreamFailed",
        "param": "p",
        "causes": [cause],
    }
    with pytest.raises(UpstreamFailed, match="m") as error:
        post(lambda _: httpx.Response(424, json={"error": detail}))
    assert error.value.param == "p"
    assert [cause.code for cause in error.value.causes] == ["engine_lost"]


def test_an_error_code_of_a_newer_service_is_a_parrot_error() -> None:
    detail = {"code": "brand_new", "message": "m", "type": "BrandNew", "causes": []}
    with pytest.raises(ParrotError, match="m"):
        post(lambda _: httpx.Response(400, json={"error": detail}))


@pytest.mark.parametrize(("status", "text"), [(502, "<html>Bad gateway"), (200, "hello"), (200, "{}")])
def test_what_is_no_parrot_service_is_said_so(status: int, text: str) -> None:
    with pytest.raises(ServiceUnreachable, match=r"stub.test.*" + text):
        post(lambda _: httpx.Response(status, text=text))


@pytest.mark.parametrize("url", ["localhost:8642", "ftp://x", "http://", "", "http://[::1"])
def test_a_bad_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the URL of a service"):
        P.Connection(url)


def test_only_the_loopback_is_local() -> None:
    assert [
        is_local(f"http://{host}:1") for host in ("127.0.0.1", "localhost", "[::1]", "10.0.0.1", "a.test")
    ] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_the_key_travels_as_bearer_token() -> None:
    stub = StubService()
    with P.connect("http://stub.test/", "secret", transport=httpx.MockTransport(stub.handle)):
        ask("x").get()
    assert stub.headers["authorization"] == "Bearer secret"


def test_white_space_around_a_key_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARROT_API_KEY", " secret\n")
    stub = StubService()
    with P.connect("http://stub.test/", transport=httpx.MockTransport(stub.handle)):
        ask("x").get()
    assert stub.headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("key", ["a b", "a\nb", "schl\u00fcssel", "\x00", " "])
def test_a_key_that_no_header_carries_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(InvalidRequest, match="characters that no key has") as error:
        P.Connection("http://stub.test/", key)
    assert key.strip() == "" or key not in error.value.message


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARROT_URL", "http://from.env/")
    stub = StubService()
    with P.connect(transport=httpx.MockTransport(stub.handle)) as connection:
        assert connection.url == "http://from.env"
        assert ask("x").get() == "ask.output"


def test_an_overloaded_service_is_a_typed_error() -> None:
    with stub_connection() as stub:
        stub.refusal = Overloaded("queue full")
        with pytest.raises(Overloaded, match="'ask' did not start: queue full"):
            ask("x").get()


def test_more_gets_than_connections_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_MAX_WAITING", 2)
    with stub_connection() as stub:
        stub.held.add("ask")
        waiting = [ask(str(i)) for i in range(4)]
        late = P.variable()
        ask(late)
        with pytest.raises(P.GetTimeout):
            P.gather(*waiting, timeout=0.3)
        with ThreadPoolExecutor(1) as threads:
            gathered = threads.submit(P.gather, *waiting)
            wait_until(lambda: stub.num_waiting == 2)
            late.set("x")  # other requests are not held up
            assert not gathered.done()
            for variable in waiting:
                background.run(stub.finish(variable.id, "y")).result(120)
            assert gathered.result(120) == ("y",) * 4
        assert stub.most_waiting == 2


class Restarting(httpx.AsyncBaseTransport):
    """In front of a stub: the service dies at chosen requests, before or after they are handled, and stays
    away for a number of attempts."""

    error: type[ParrotError] | None = None  # what it says while it is away; None: nothing

    def __init__(self, stub: StubService, *, durable: bool = True) -> None:
        self.stub = stub
        self.stub.durable = durable
        self.dies_after: list[str] = []  # paths whose next answer is lost
        self.num_refusals = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.num_refusals > 0:
            self.num_refusals -= 1
            if self.error is not None:
                detail = {"code": self.error.code, "message": "m", "type": self.error.__name__, "causes": []}
                return httpx.Response(self.error.http_status, json={"error": detail})
            raise httpx.ConnectError("refused")
        await request.aread()
        reply = await self.stub.handle(request)
        if request.url.path in self.dies_after:
            self.dies_after.remove(request.url.path)
            self.num_refusals = 2
            raise httpx.RemoteProtocolError("disconnected")
        return reply


def test_a_durable_service_may_go_away_and_come_back() -> None:
    """What was sent and not answered is sent again, as the same submit: the service runs it once."""
    stub = StubService()
    transport = Restarting(stub)
    with P.connect("http://stub.test", transport=transport):
        assert ask("x").get() == "ask.output"  # says that it is durable
        transport.dies_after = ["/v1/submit", "/v1/get", "/v1/set", "/v1/cancel"]
        late = P.variable()
        answer = ask(late)
        late.set("y")
        assert answer.get() == "ask.output"
        late.cancel()
        assert transport.dies_after == ["/v1/cancel"]  # it is settled here
        stub.held.add("ask")
        ask("z").cancel()
    assert transport.dies_after == []
    ids = [submit.submit_id for submit in stub.submits]
    assert len(ids) == 4
    assert ids[1] == ids[2]
    assert len(set(ids)) == 3


def test_a_durable_service_that_is_shut_down_in_order_is_waited_for_too() -> None:
    transport = Restarting(StubService())
    transport.error = ServiceStopping
    with P.connect("http://stub.test", transport=transport):
        assert ask("x").get() == "ask.output"
        transport.num_refusals = 3
        assert ask("y").get() == "ask.output"
        transport.error = Unavailable  # no word of a journal
        transport.num_refusals = 1
        with pytest.raises(Unavailable):
            ask("z").get()


@pytest.mark.parametrize(
    ("durable", "reconnect_s", "num_tries"), [(False, None, 1), (True, 0.0, 1), (False, 0.3, 3)]
)
def test_a_service_that_stays_away_is_given_up(
    durable: bool, reconnect_s: float | None, num_tries: int
) -> None:
    transport = Restarting(StubService(), durable=durable)
    with P.connect("http://stub.test", transport=transport, reconnect_s=reconnect_s):
        assert ask("x").get() == "ask.output"
        pending = ask("y")
        transport.num_refusals = 1000
        with pytest.raises(ServiceUnreachable):
            pending.get()
    assert 1000 - transport.num_refusals >= num_tries


def test_a_get_waits_for_a_service_that_is_away_no_longer_than_its_timeout() -> None:
    transport = Restarting(StubService())
    with P.connect("http://stub.test", transport=transport):
        assert ask("x").get() == "ask.output"
        pending = P.variable()
        ask(pending)
        assert not pending.done()
        transport.num_refusals = 1000
        with pytest.raises(P.GetTimeout):
            pending.get(timeout=0.1)
        transport.num_refusals = 0


def test_a_round_trip_is_paid_once_for_a_chain() -> None:
    with stub_connection() as stub:
        text = "a"
        for _ in range(50):
            text = ask(text)
        assert text.get() == "ask.output"
        assert stub.num_requests == 2
    assert [len(submit.calls) for submit in stub.submits] == [50]


def test_the_import_is_light_and_every_name_is_there() -> None:
    program = """
        import sys
        before = set(sys.modules)
        import parrot as P
        num_loaded = len(set(sys.modules) - before)
        heavy = {"torch", "fastapi", "httpx", "pydantic", "numpy"} & set(sys.modules)
        assert not heavy, heavy
        import parrot.template
        assert callable(P.template)
        for name in P.__all__:
            assert getattr(P, name) is not None
        assert set(P.__all__) == set(P._HOMES)
        assert P.SemanticFunction is P.function and P.variable is P.SemanticVariable
        assert isinstance(P.__version__, str)
        assert not {"torch", "fastapi"} & set(sys.modules)
        print(num_loaded)
    """
    run = run_program(program)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 200  # a thousand with the service and torch


def test_a_program_that_ends_deletes_its_sessions_quickly() -> None:
    program = """
        import atexit, sys, time
        def report():
            gone = sorted(stub.deleted) == sorted(stub.sessions)
            print(gone, len(stub.sessions), time.monotonic() - begun < 60)
        atexit.register(report)  # runs last: handlers run in reverse
        sys.path.insert(0, "tests")
        import httpx
        import parrot as P
        from frontend_stub import StubService
        from parrot.frontend import connection, session
        connection._EXIT_S = session._LAST_SUBMIT_S = 60  # a busy machine may take long for little
        stub = StubService()
        P.connect("http://stub.test", transport=httpx.MockTransport(stub.handle))
        @P.function
        def ask(text):
            "{{input:text}} {{output}}"
        ask("x").get()
        scope = P.session()
        with scope:
            ask("x").get()
        stub.held.add("ask")
        ask("pending")
        begun = time.monotonic()
    """
    run = run_program(program)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["True", "2", "True"], run.stderr
    assert run.stderr == ""
