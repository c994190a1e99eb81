"""Who sends a request: the key in its Authorization header, and what that key may do.

An ASGI middleware before everything else, so that a stranger's body is not even read. The tenant comes from
the key alone; nothing that a request says about itself is looked at.
"""

from __future__ import annotations

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ParrotError, PermissionDenied
from .http_errors import error_response
from .tenants import Caller, Tenants

_CALLER = "parrot.caller"  # in the ASGI scope, which clients cannot reach
_SCHEME = b"bearer "
# Probes of an orchestrator have no key. What they learn is that the service lives, and whether it is ready.
OPEN = frozenset({"/health", "/ready"})
# About all tenants together.
OPERATORS = frozenset({"/metrics", "/v1/engines"})
# What an operator's key may see besides: it belongs in a monitoring system's configuration, and runs nothing.
SHARED = frozenset({"/v1/calls", "/v1/models", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"})
# A tenant that has used up its requests may still give back what it holds.
_UNCOUNTED = frozenset({"/v1/cancel"})


class Auth:
    """Lets a request through with its caller, or answers 401, 403 or 429."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[_CALLER] = self._admit(scope)
            except ParrotError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller:
        path: str = scope["path"]
        key = _bearer(scope)
        if path in OPEN and key is None and self._tenants.has_keys:
            return _NOBODY
        caller = self._tenants.caller(key)
        if not caller.is_operator and path in OPERATORS:
            raise PermissionDenied(f"{path} is for the operator; a tenant's key does not open it")
        if caller.tenant is not None:
            if path not in OPEN and path not in _UNCOUNTED and scope["method"] != "DELETE":
                caller.tenant.take_request()
        elif path not in OPEN | OPERATORS | SHARED:
            raise PermissionDenied(f"{path} acts for a tenant; an operator's key does not open it")
        return caller


_NOBODY = Caller(None, is_operator=False)


def caller_of(connection: HTTPConnection) -> Caller:
    """Who sent this request."""
    caller: Caller = connection.scope[_CALLER]
    return caller


def caller_name(scope: Scope) -> str:
    """The tenant of a request that :class:`Auth` let through; empty for whoever is none."""
    tenant = scope[_CALLER].tenant
    return "" if tenant is None else str(tenant.name)


def tenant_of(connection: HTTPConnection) -> str:
    """The name of the tenant who sent this request. Raises :class:`PermissionDenied` if nobody did."""
    tenant = caller_of(connection).tenant
    if tenant is None:
        raise PermissionDenied("this acts for a tenant; the request has no tenant's key")
    return tenant.name


def _bearer(scope: Scope) -> bytes | None:
    """The key that was sent; None without one. Two headers are none: a proxy may have looked at the other."""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(found) != 1 or found[0][: len(_SCHEME)].lower() != _SCHEME:
        return None
    return bytes(found[0][len(_SCHEME) :].strip())
