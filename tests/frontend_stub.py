"""A stand-in for the service's HTTP API in the front end's unit tests: it checks and records every body, and
outputs get the value that the test decides. The real service is used in tests/system/test_frontend.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import httpx

import parrot as P
from parrot.api import (
    CallBody,
    CancelBody,
    GetBody,
    PlaceholderBody,
    SetBody,
    SubmitBody,
    SubmitReply,
    SubmittedCall,
)
from parrot.errors import Cancelled, DuplicateRequest, ParrotError, SessionNotFound, VariableNotFound
from parrot.frontend import session


class StubService:
    """Answers for one or more connections. ``held`` functions produce nothing until :meth:`finish`."""

    def __init__(self) -> None:
        self.submits: list[SubmitBody] = []
        self.gets: list[GetBody] = []
        self.deleted: list[str] = []
        self.sessions: set[str] = set()
        self.held: set[str] = set()
        self.values: dict[str, str] = {}  # by "function.output", what is not just that
        self.refusal: ParrotError | None = None
        self.durable = False
        self.round_trip_s = 0.0
        self.submit_pause_s = 0.0  # before a submit is looked at
        self.submits_wait_for_gets = False  # of a variable that the submit declares, before it is looked at
        self.answers_wait_for_gets = False  # the same, after it was
        self.num_requests = 0
        self.num_waiting = 0
        self.most_waiting = 0
        self.headers: httpx.Headers = httpx.Headers()
        self._ends: dict[str, str | ParrotError] = {}
        self._changed = asyncio.Condition()

    @property
    def calls(self) -> list[CallBody]:
        """All calls, in the order in which they arrived."""
        return [call for submit in self.submits for call in submit.calls]

    async def finish(self, variable_id: str, end: str | ParrotError) -> None:
        """Give a variable its value or its error."""
        async with self._changed:
            self._ends[variable_id] = end
            self._changed.notify_all()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        """One request."""
        self.num_requests += 1
        await asyncio.sleep(self.round_trip_s / 2)
        self.headers = request.headers
        try:
            response = await self._route(request)
        except ParrotError as error:
            detail = {
                "code": error.code,
                "message": error.message,
                "type": type(error).__name__,
                "causes": [],
            }
            response = httpx.Response(error.http_status, json={"error": detail})
        await asyncio.sleep(self.round_trip_s / 2)
        return response

    async def _route(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, request.content
        if request.method == "DELETE":
            self.deleted.append(path.rsplit("/", 1)[1])
        elif path == "/v1/submit":
            return await self._submit(SubmitBody.model_validate_json(body))
        elif path == "/v1/get":
            return await self._get(GetBody.model_validate_json(body))
        elif path == "/v1/set":
            setting = SetBody.model_validate_json(body)
            await self.finish(setting.semantic_var_id, setting.value)
        elif path == "/v1/cancel":
            await self.finish(
                CancelBody.model_validate_json(body).semantic_var_id, Cancelled("cancelled by the client")
            )
        else:
            return httpx.Response(404, text="no such path")
        return httpx.Response(200, json={})

    async def _submit(self, body: SubmitBody) -> httpx.Response:
        await asyncio.sleep(self.submit_pause_s)
        if self.submits_wait_for_gets:
            await self._get_beside(body)
        reply = self._take(body)
        async with self._changed:
            self._changed.notify_all()
        if self.answers_wait_for_gets:
            await self._get_beside(body)
        return reply

    async def _get_beside(self, body: SubmitBody) -> None:
        async with asyncio.timeout(120), self._changed:
            await self._changed.wait_for(lambda: any(get.submit_id == body.submit_id for get in self.gets))

    def _take(self, body: SubmitBody) -> httpx.Response:
        is_known = any(body.submit_id == submit.submit_id for submit in self.submits)
        if body.create_session and body.session_id in self.sessions and not is_known:
            raise DuplicateRequest(f"session {body.session_id} exists")
        if not body.create_session and body.session_id not in self.sessions:
            raise SessionNotFound(f"no session {body.session_id}")
        self.sessions.add(body.session_id)
        if self.refusal is not None:
            raise self.refusal
        self.submits.append(body)
        self._ends.update((v.semantic_var_id, v.value) for v in body.variables if v.value is not None)
        replies = []
        for number, call in enumerate(body.calls):
            outputs = {p.name: p.semantic_var_id or "" for p in call.placeholders if p.kind == "output"}
            if call.function not in self.held:
                for name, variable in outputs.items():
                    default = f"{call.function}.{name}"
                    self._ends[variable] = self.values.get(default, default)
            replies.append(SubmittedCall(request_id=f"r{number}", outputs=outputs))
        reply = SubmitReply(session_id=body.session_id, calls=tuple(replies), durable=self.durable)
        return httpx.Response(200, text=reply.model_dump_json())

    async def _until_taken(self, body: GetBody) -> None:
        try:
            async with asyncio.timeout((body.timeout_ms or 0) / 1000), self._changed:
                await self._changed.wait_for(
                    lambda: (
                        (body.session_id, body.submit_id)
                        in [(submit.session_id, submit.submit_id) for submit in self.submits]
                    )
                )
        except TimeoutError:
            raise VariableNotFound(f"no variable {body.semantic_var_id}") from None

    async def _get(self, body: GetBody) -> httpx.Response:
        async with self._changed:
            self.gets.append(body)
            self._changed.notify_all()
        if body.submit_id is not None:
            await self._until_taken(body)
        name = body.semantic_var_id
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        try:
            async with asyncio.timeout((body.timeout_ms or 0) / 1000), self._changed:
                await self._changed.wait_for(lambda: name in self._ends)
        except TimeoutError:
            if name not in self._ends:
                return httpx.Response(200, json={"semantic_var_id": name, "status": "pending"})
        finally:
            self.num_waiting -= 1
        end = self._ends[name]
        if isinstance(end, ParrotError):
            raise end
        return httpx.Response(200, json={"semantic_var_id": name, "status": "ready", "value": end})


def flush(variable: P.SemanticVariable) -> None:
    """The time after which calls go out by themselves has passed."""
    opened = variable.session
    assert opened is not None
    with opened._lock:
        opened._flush()


def wait_until(condition: Callable[[], object], limit_s: float = 120.0) -> None:
    """Until it holds; for threads."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.005)


@contextmanager
def stub_connection(flush_s: float = 600.0) -> Iterator[StubService]:
    """The default connection leads to a new stub. Calls go out when something asks for them, and not because
    a busy machine let ``flush_s`` go by between two of them; nor is an answer late because it is busy."""
    stub = StubService()
    with (
        patch.object(session, "FLUSH_S", flush_s),
        patch.object(session, "_GRACE_S", 600.0),
        P.connect("http://stub.test", transport=httpx.MockTransport(stub.handle)),
    ):
        yield stub


@P.function
def two_outputs(question):
    """
    Think about {{input:question}}: {{output:thought}}
    Answer, given {{input:thought}}: {{output:answer}}
    """


def placeholders(service: StubService, call: int = 0) -> dict[str, PlaceholderBody]:
    """Those of a call that has arrived, by name."""
    return {placeholder.name: placeholder for placeholder in service.calls[call].placeholders}
