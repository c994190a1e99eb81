"""Clients that run programs while things go wrong, a third of whom leave in the middle; what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from .programs import Program

LEAVERS = 0.3
_RETRY_S = 0.1
_POLL_MS = 3000
_LEAVE_WITHIN_S = 1.5
_HARMLESS = frozenset({"engine_lost", "upstream_failed"})  # what a call may end with that was hit too often


@dataclass
class Outcomes:
    """Of all sessions so far. Everything but the first two and the leavers is a broken promise."""

    counts: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def add(self, what: str, detail: str = "") -> None:
        """One session more."""
        self.counts[what] += 1
        if detail and len(self.details) < 20:
            self.details.append(f"{what}: {detail}")

    @property
    def broken(self) -> int:
        """Sessions that got something else than the right value or an error that tells why there is none."""
        fine = ("right", "typed error", "left")
        return sum(count for what, count in self.counts.items() if not what.startswith(fine))


class Unended(Exception):
    """The answer did not come before the deadline."""


class Clients:
    """``expected``: the right value of each program."""

    def __init__(self, url: str, model: str, expected: Mapping[str, str], seed: int) -> None:
        self.outcomes = Outcomes()
        self._url = url
        self._model = model
        self._expected = expected
        self._random = random.Random(seed)
        self._deadline = float("inf")  # of the loop's clock

    async def work(self, programs: Sequence[Program], num_clients: int, stop: asyncio.Event) -> None:
        """So many clients at a time run one program after another until ``stop``, then end their last."""
        async with _client(self._url) as http:
            await asyncio.gather(*(self._client(http, programs, stop) for _ in range(num_clients)))

    def finish_within(self, seconds: float) -> None:
        """What has not ended by then counts as never ended."""
        self._deadline = asyncio.get_running_loop().time() + seconds

    async def _client(
        self, http: httpx.AsyncClient, programs: Sequence[Program], stop: asyncio.Event
    ) -> None:
        while not stop.is_set():
            program = self._random.choice(programs)
            try:
                if self._random.random() < LEAVERS:
                    await self._leave(http, program)
                else:
                    await self._run(http, program)
            except Unended as error:
                self.outcomes.add("never ended", f"{program.name}: {error}")
            except Exception as error:
                self.outcomes.add("client failed", f"{program.name}: {type(error).__name__}: {error}")

    async def _run(self, http: httpx.AsyncClient, program: Program) -> None:
        session = await self._submit(http, program)
        reply = await self._get(http, session, program.wanted)
        if reply.status_code == 200:
            is_right = reply.json()["value"] == self._expected[program.name]
            self.outcomes.add(
                "right" if is_right else "wrong", "" if is_right else f"{program.name} {session}"
            )
        else:
            code = _code(reply)
            kind = (
                "typed error" if code in _HARMLESS else "lost" if reply.status_code in (404, 410) else "error"
            )
            self.outcomes.add(f"{kind} {code}", "" if code in _HARMLESS else reply.text[:300])
        await self._delete(http, session)

    async def _leave(self, http: httpx.AsyncClient, program: Program) -> None:
        way = self._random.choice(("vanished", "deleted", "stream"))
        if way == "stream":
            await self._leave_stream(http)
        else:
            session = await self._submit(http, program)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._get(http, session, program.wanted), self._random.uniform(0.02, _LEAVE_WITHIN_S)
                )
            if way == "deleted":
                await self._delete(http, session)
        self.outcomes.add(f"left: {way}")

    async def _leave_stream(self, http: httpx.AsyncClient) -> None:
        body = {
            "model": self._model,
            "prompt": "quick brown",
            "max_tokens": 500,
            "stream": True,
            "ignore_eos": True,
        }
        with contextlib.suppress(httpx.HTTPError):
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                async for _ in reply.aiter_lines():
                    break

    async def _submit(self, http: httpx.AsyncClient, program: Program) -> str:
        session = f"s-{secrets.token_hex(16)}"
        body = {
            "session_id": session,
            "create_session": True,
            "submit_id": secrets.token_hex(8),
            "calls": program.calls,
        }
        reply = await self._ask(http, "POST", "/v1/submit", body)
        if reply.status_code != 200:
            raise RuntimeError(f"submit: {reply.status_code} {reply.text[:300]}")
        return session

    async def _get(self, http: httpx.AsyncClient, session: str, variable: str) -> httpx.Response:
        body = {"session_id": session, "semantic_var_id": variable, "timeout_ms": _POLL_MS}
        while True:
            reply = await self._ask(http, "POST", "/v1/get", body)
            if reply.status_code != 200 or reply.json()["status"] == "ready":
                return reply

    async def _delete(self, http: httpx.AsyncClient, session: str) -> None:
        await self._ask(http, "DELETE", f"/v1/session/{session}", None)

    async def _ask(
        self, http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
    ) -> httpx.Response:
        """Ask again while nobody answers, or the answer is to try later."""
        problem = "no answer"
        while asyncio.get_running_loop().time() < self._deadline:
            try:
                reply = await http.request(method, path, json=body)
                if not (reply.status_code in (429, 503) and "retry-after" in reply.headers):
                    return reply
                problem = reply.text[:200]
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            await asyncio.sleep(_RETRY_S)
        raise Unended(f"{method} {path}: {problem}")


async def solo_values(url: str, programs: Sequence[Program]) -> dict[str, str]:
    """The value of each program, run alone, one after the other."""
    values: dict[str, str] = {}
    clients = Clients(url, "", {}, 0)
    async with _client(url) as http:
        for program in programs:
            session = await clients._submit(http, program)
            reply = await clients._get(http, session, program.wanted)
            values[program.name] = reply.json()["value"]
            await clients._delete(http, session)
    return values


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=30, limits=limits)


def _code(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return str(reply.status_code)
