"""The HTTP client: one JSON body out, one typed reply or typed error back.

The bodies are those of :mod:`parrot.api`; every 4xx and 5xx answer becomes the error class that the service
raised (:func:`parrot.errors.error_from_info`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from ..api import ErrorDetail, ErrorReply
from ..errors import (
    ErrorInfo,
    InvalidRequest,
    ParrotError,
    ServiceStopping,
    ServiceUnreachable,
    error_from_info,
)

R = TypeVar("R", bound=BaseModel)

NETWORK_S = 30.0  # how long an answer may take beyond the time the service was told to wait
RECONNECT_S = 60.0  # as long as a standalone engine waits for its manager
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_MAX_WAITING = 256  # long polls at a time, each of which holds a connection
_KEEPALIVE_S = 3.0  # below uvicorn's 5 s, so that we never write to a connection the service is closing


class Client:
    """Requests to one service.

    ``find_url`` is awaited before each request: it waits for an embedded service to start, and raises what
    went wrong with it. ``transport`` replaces httpx's own, for tests and for emulated networks.

    A ``repeatable`` request (the service does nothing twice) is sent again while the service is out of reach,
    for ``reconnect_s`` seconds. None: for a minute if the service keeps a journal (``durable``), since one
    that is started again then knows what this program waits for; else not at all.
    """

    def __init__(
        self,
        find_url: Callable[[], Awaitable[str]],
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        reconnect_s: float | None = None,
    ) -> None:
        self._find_url = find_url
        self._headers = {"content-type": "application/json", "user-agent": "parrot-client"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {_checked_key(api_key)}"
        self._transport = transport
        self._reconnect_s = reconnect_s
        self.durable = False  # the service says that sessions survive its own death
        self._http: httpx.AsyncClient | None = None
        self._waiting = asyncio.Semaphore(_MAX_WAITING)
        self._pid = 0

    async def post(
        self, path: str, body: BaseModel, reply: type[R], *, wait_s: float = 0.0, repeatable: bool = False
    ) -> R:
        """POST ``body``; the service may hold its answer for ``wait_s`` seconds. Raises the service's typed
        error, or :class:`ServiceUnreachable`."""
        send = self._repeat if repeatable else self._request
        if wait_s == 0.0:
            return _parse(await send("POST", path, body, wait_s), reply)
        async with self._waiting:
            return _parse(await send("POST", path, body, wait_s), reply)

    @property
    def crowded(self) -> bool:
        """Whether all long polls are in use, so that others wait for their turn."""
        return self._waiting.locked()

    async def send(
        self, method: str, path: str, body: BaseModel | None = None, *, repeatable: bool = False
    ) -> None:
        """A request whose answer has no content of interest. Raises as :meth:`post` does."""
        send = self._repeat if repeatable else self._request
        await send(method, path, body, 0.0)

    async def close(self) -> None:
        """Close the pooled connections."""
        if self._http is not None and self._pid == os.getpid():
            await self._http.aclose()
        self._http = None

    async def _repeat(self, method: str, path: str, body: BaseModel | None, wait_s: float) -> httpx.Response:
        """Send until there is an answer, or the service was out of reach for too long."""
        clock = asyncio.get_running_loop().time
        pause_s, deadline = _FIRST_PAUSE_S, math.inf
        while True:
            try:
                return await self._request(method, path, body, wait_s)
            except (ServiceUnreachable, ServiceStopping):
                deadline = min(deadline, clock() + self._patience_s)
                if clock() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # not all clients at once
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    @property
    def _patience_s(self) -> float:
        if self._reconnect_s is not None:
            return self._reconnect_s
        return RECONNECT_S if self.durable else 0.0

    async def _request(self, method: str, path: str, body: BaseModel | None, wait_s: float) -> httpx.Response:
        url = await self._find_url()
        content = None if body is None else body.model_dump_json(exclude_none=True, by_alias=True)
        timeout = httpx.Timeout(NETWORK_S, read=NETWORK_S + wait_s, pool=None)
        http = self._open(url)
        try:
            response = await http.request(
                method, url + path, content=content, headers=self._headers, timeout=timeout
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServiceUnreachable(
                f"no Parrot service answers at {url} ({_reason(error)}); start one with `parrot serve`, "
                "or name another with P.connect(url) or the environment variable PARROT_URL"
            ) from None
        except httpx.TransportError as error:
            raise ServiceUnreachable(
                f"the Parrot service at {url} did not answer {path} ({_reason(error)}); "
                "see whether it still runs: `parrot doctor` and its log say what went wrong"
            ) from None
        if response.status_code >= 400:
            raise _error(response)
        return response

    def _open(self, url: str) -> httpx.AsyncClient:
        if self._http is None or self._pid != os.getpid():
            limits = httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEPALIVE_S
            )
            # A proxy from the environment must not catch what stays on this machine.
            self._http = httpx.AsyncClient(
                transport=self._transport, limits=limits, trust_env=not is_local(url)
            )
            self._waiting = asyncio.Semaphore(_MAX_WAITING)
            self._pid = os.getpid()
        return self._http


def check_url(url: str) -> str:
    """``url`` without a trailing slash; raises :class:`InvalidRequest` unless it is http or https."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = None
    if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidRequest(
            f"{url!r} is not the URL of a service, such as http://127.0.0.1:8642", param="url"
        )
    return url.rstrip("/")


def _checked_key(api_key: str) -> str:
    """The key without white space around it, as files and variables often have; raises
    :class:`InvalidRequest` for one that no header can carry, without repeating it."""
    key = api_key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidRequest(
            "the API key has characters that no key has; pass it as the operator gave it, to P.connect(url, "
            "api_key) or in PARROT_API_KEY",
            param="api_key",
        )
    return key


def is_local(url: str) -> bool:
    """Whether ``url`` names this machine's loopback."""
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _parse(response: httpx.Response, reply: type[R]) -> R:
    try:
        return reply.model_validate_json(response.content)
    except ValidationError:
        raise ServiceUnreachable(
            f"what answers at {response.url} is not a Parrot service of this version: {response.text[:200]!r}"
        ) from None


def _error(response: httpx.Response) -> ParrotError:
    try:
        return error_from_info(_info(ErrorReply.model_validate_json(response.content).error))
    except ValidationError:
        return ServiceUnreachable(
            f"{response.url} answered {response.status_code} without a Parrot error: {response.text[:200]!r}"
        )


def _info(detail: ErrorDetail) -> ErrorInfo:
    causes = tuple(_info(cause) for cause in detail.causes)
    return ErrorInfo(detail.code, detail.message, detail.param, causes)
