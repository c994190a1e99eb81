"""Every way a request can fail, as one shape of answer: :class:`parrot.api.ErrorReply` with its status."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from ..api import ErrorDetail, ErrorReply
from ..errors import (
    AuthenticationError,
    ErrorInfo,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    ParrotError,
    RateLimited,
    RequestTooLarge,
    Unavailable,
    error_from_info,
)
from .disconnect import ClientLeft

log = logging.getLogger(__name__)
RETRY_AFTER_S = 1
_CLIENT_CLOSED_REQUEST = 499  # nobody reads it
_MAX_REASON = 300  # a reason may repeat what was sent
_UNION_MEMBER = re.compile(r"(int|str|constrained-str|list\[.*\])\Z")  # what pydantic tried, not a field


def error_responses(*classes: type[ParrotError]) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` argument of a route that can answer with these errors."""
    by_status: dict[int, list[str]] = {}
    for cls in classes:
        by_status.setdefault(cls.http_status, []).append(f"`{cls.code}`: {_first_line(cls)}")
    return {
        status: {"model": ErrorReply, "description": " ".join(lines)} for status, lines in by_status.items()
    }


def _first_line(cls: type[ParrotError]) -> str:
    return (cls.__doc__ or "").strip().split("\n")[0]


def error_detail(info: ErrorInfo) -> ErrorDetail:
    """An error as the body shows it; text that is not valid Unicode is replaced."""
    return ErrorDetail(
        code=info.code,
        message=_clean(info.message),
        type=type(error_from_info(info)).__name__,
        param=None if info.param is None else _clean(info.param),
        causes=tuple(error_detail(cause) for cause in info.causes),
    )


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def error_response(error: ParrotError) -> JSONResponse:
    """The answer for an error: its status, its body, and Retry-After when trying again makes sense."""
    body = ErrorReply(error=error_detail(error.to_info()))
    return JSONResponse(body.model_dump(mode="json"), status_code=error.http_status, headers=_headers(error))


def _headers(error: ParrotError) -> dict[str, str] | None:
    if isinstance(error, RateLimited):
        return {"Retry-After": str(math.ceil(error.retry_after_s))}
    if isinstance(error, Overloaded | Unavailable):
        return {"Retry-After": str(RETRY_AFTER_S)}
    if isinstance(error, AuthenticationError):
        return {"WWW-Authenticate": 'Bearer realm="parrot"'}
    return None


def install_error_handlers(app: FastAPI) -> None:
    """Translate every exception that can leave a route."""

    async def on_parrot_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ParrotError)
        return error_response(error)

    async def on_validation_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(invalid_request(error.errors()))

    async def on_http_exception(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return _http_exception_response(error)

    async def on_client_left(_: Request, __: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        log.error("bug while answering %s %s", request.method, request.url.path, exc_info=error)
        return error_response(InternalError(f"{type(error).__name__} in the service; its log has the trace"))

    app.add_exception_handler(ParrotError, on_parrot_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientLeft, on_client_left)
    app.add_exception_handler(Exception, on_bug)


def invalid_request(errors: Iterable[Any]) -> InvalidRequest:
    """pydantic's findings as one error; ``param`` is the first field, the input itself is not repeated."""
    findings = [_finding(item) for item in errors]
    message = "; ".join(f"{field or 'body'}: {text}" for field, text in findings[:5])
    if len(findings) > 5:
        message += f"; and {len(findings) - 5} more"
    return InvalidRequest(message, param=(findings[0][0] or None) if findings else None)


def _finding(item: Any) -> tuple[str, str]:
    """The field that one of pydantic's errors is about, and what is wrong with it."""
    if item["type"] == "json_invalid":
        return "", f"not JSON at character {item['loc'][-1]}: {item['ctx']['error']}"
    parts = [f"{part:.64}" if isinstance(part, str) else str(part) for part in item["loc"] if part != "body"]
    return ".".join(part for part in parts if not _UNION_MEMBER.match(part)), f"{item['msg']:.{_MAX_REASON}}"


def _http_exception_response(error: HTTPException) -> JSONResponse:
    detail = str(error.detail)
    if error.status_code == 404:
        return error_response(NotFound("no such route; /docs and /openapi.json list what there is"))
    if error.status_code == 413:
        return error_response(RequestTooLarge(detail))
    if error.status_code == 503:
        return error_response(Unavailable(detail))
    response = error_response(InvalidRequest(detail))
    response.status_code = error.status_code
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response
