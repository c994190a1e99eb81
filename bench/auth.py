"""What an API key costs: a request through the middleware that finds its caller, with nothing behind it.

The same loop without the middleware is taken off. ``ok``: a request with a known key costs less than 20 us.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send

from parrot.manager.auth import Auth
from parrot.manager.key_file import KeyEntry, KeyFile, TenantLimits, digest_of, new_key
from parrot.manager.tenants import Tenants

from .timing import Spread, print_table, show, spread

LIMIT_US = 20.0
_UNLIMITED = TenantLimits(requests_per_minute=2**31 - 1, tokens_per_minute=2**31 - 1)
_HEADERS = [
    (b"host", b"127.0.0.1:8642"),
    (b"accept", b"*/*"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"connection", b"keep-alive"),
    (b"user-agent", b"parrot-client"),
    (b"content-type", b"application/json"),
    (b"content-length", b"300"),
]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Keys in the file, requests of a run, and runs, in turns with those without the middleware."""

    num_keys: Sequence[int] = (1, 1_000, 100_000)
    num_requests: int = 20_000
    repeats: int = 15


FULL = Sizes()
QUICK = Sizes(num_keys=(1_000,), num_requests=2_000, repeats=5)


def run(quick: bool) -> dict[str, Any]:
    """Measure and print all rows."""
    return measure(QUICK if quick else FULL)


def measure(sizes: Sizes) -> dict[str, Any]:
    """All rows at ``sizes``."""
    figures = {num_keys: asyncio.run(_cost(num_keys, sizes)) for num_keys in sizes.num_keys}
    rows = [(f"{num_keys:,}", show(figure)) for num_keys, figure in figures.items()]
    print_table("a request with a key", ("keys in the file", "us"), rows)
    ok = all(figure["median"] < LIMIT_US for figure in figures.values())
    return {"us_per_request": {str(num_keys): figure for num_keys, figure in figures.items()}, "ok": ok}


async def _cost(num_keys: int, sizes: Sizes) -> Spread:
    """Microseconds that the middleware adds to a request."""
    keys = [new_key() for _ in range(num_keys)]
    entries = [KeyEntry(sha256=digest_of(key), tenant=f"t{index}") for index, key in enumerate(keys)]
    tenants = {f"t{index}": _UNLIMITED for index in range(num_keys)}
    guarded = Auth(cast(ASGIApp, _nothing), Tenants(KeyFile(tenants=tenants, keys=entries)))
    headers = [*_HEADERS, (b"authorization", b"Bearer " + keys[num_keys // 2].encode())]
    costs = []
    for _ in range(sizes.repeats):
        bare = await _time(_nothing, headers, sizes.num_requests)
        costs.append(await _time(guarded, headers, sizes.num_requests) - bare)
    return spread(costs)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that does nothing."""


async def _time(app: ASGIApp, headers: list[tuple[bytes, bytes]], num_requests: int) -> float:
    """Microseconds of this thread that each of so many requests takes."""
    started = time.thread_time()
    for _ in range(num_requests):
        scope = {"type": "http", "method": "POST", "path": "/v1/submit", "headers": headers}
        await app(scope, _never, _never)
    return (time.thread_time() - started) / num_requests * 1e6


async def _never(*_: Any) -> Any:
    raise AssertionError("nothing is received or sent")
