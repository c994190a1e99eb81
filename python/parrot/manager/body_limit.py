"""How large a body may be, and how much of bodies the service holds at once."""

from __future__ import annotations

from collections import Counter

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ParrotError, RequestTooLarge, Unavailable
from .auth import caller_name
from .http_errors import error_response

MAX_HELD_BYTES = 256 * 2**20
_SMALL_BYTES = 2**20  # counts until it has arrived; a larger one until it is answered


class BodyLimit:
    """ASGI middleware: a body above the limit is refused with 413 while it is read, not after; one for which
    there is no room beside the others with 503. Of several tenants none may take more than half the room."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, *, has_keys: bool = False) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_of_one = MAX_HELD_BYTES // 2 if has_keys else MAX_HELD_BYTES
        self._held: Counter[str] = Counter()  # bytes, by tenant
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant = caller_name(scope)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        error = self._refusal(tenant, 0, int(declared)) if declared.isdigit() else None
        if error is not None:
            await error_response(error)(scope, receive, send)
            return
        num_bytes = num_held = 0

        async def counted() -> Message:
            nonlocal num_bytes, num_held
            message = await receive()
            size = len(message.get("body", b""))
            if size:
                error = self._refusal(tenant, num_bytes, size)
                if error is not None:
                    # An HTTPException, for FastAPI makes a 400 of other errors while it reads a body.
                    raise HTTPException(error.http_status, error.message)
                num_bytes += size
                num_held += size
                self._hold(tenant, size)
            if num_held and num_bytes <= _SMALL_BYTES and not message.get("more_body", False):
                self._hold(tenant, -num_held)
                num_held = 0
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            if num_held:
                self._hold(tenant, -num_held)

    def _refusal(self, tenant: str, num_bytes: int, more: int) -> ParrotError | None:
        if num_bytes + more > self._max_body_bytes:
            return RequestTooLarge(f"the body is larger than {self._max_body_bytes} bytes")
        if self._num_held + more > MAX_HELD_BYTES or self._held[tenant] + more > self._max_of_one:
            return Unavailable("too many large bodies are being received; try again later")
        return None

    def _hold(self, tenant: str, num_bytes: int) -> None:
        self._num_held += num_bytes
        self._held[tenant] += num_bytes
        if not self._held[tenant]:
            del self._held[tenant]
