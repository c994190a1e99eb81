"""The HTTP face of the manager: the only place that sees JSON."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from .. import __version__
from ..api import ErrorReply, SubmitBody
from ..errors import AuthenticationError, InternalError, PermissionDenied, RateLimited, Unavailable
from .auth import Auth, caller_of
from .body_limit import BodyLimit
from .engines import EngineRegistry
from .gate import Gate
from .http_errors import error_response, error_responses, install_error_handlers
from .metrics import Metrics
from .openai_api import openai_router
from .readiness import unready_reason
from .routes import session_router
from .service import Service
from .slices import run_in_slices
from .submit_body import schemas_of
from .supervisor import Supervisor

_NOT_READY = "the service is not ready; its log says why, and so does this route to an operator's key"


class Health(BaseModel):
    """The process answers; ``service`` tells it from others on the port."""

    status: Literal["ok"] = "ok"
    service: Literal["parrot"] = "parrot"


class Ready(BaseModel):
    """Calls can run. ``stalled``: what is known, beside the ``engines`` that are there, of hung ones."""

    status: Literal["ready"] = "ready"
    engines: int
    stalled: list[str] = []


def create_app(service: Service, registry: EngineRegistry, supervisor: Supervisor | None = None) -> FastAPI:
    """All routes around one service."""
    has_keys = service.tenants.has_keys
    if has_keys != (service.config.api_keys is not None):
        raise InternalError("the service was not given the keys that its configuration names")
    app = FastAPI(
        title="Parrot",
        version=__version__,
        summary="Serves LLM applications: whole graphs of prompt templates joined by Semantic Variables.",
        responses={
            500: {"model": ErrorReply, "description": "A bug in the service."},
            **(error_responses(AuthenticationError, PermissionDenied, RateLimited) if has_keys else {}),
        },
    )
    install_error_handlers(app)
    app.include_router(session_router(service, registry))
    app.include_router(openai_router(service))
    _add_probes(app, service, registry, supervisor)
    _add_metrics(app, Metrics(service, registry))
    app.add_middleware(BodyLimit, max_body_bytes=service.config.max_body_bytes, has_keys=has_keys)
    if not service.recovered.is_set():
        app.add_middleware(Gate, opened=service.recovered)
    app.add_middleware(Auth, tenants=service.tenants)  # the outermost: it comes before the body is read
    _correct_openapi(app, has_keys=has_keys)
    return app


def _correct_openapi(app: FastAPI, *, has_keys: bool) -> None:
    """Take out FastAPI's own 422: a body that does not validate is a 400 with our error body. Put in what the
    route of submits reads, which FastAPI does not know, and the key that requests need."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            schemas = document["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas.update(schemas_of(SubmitBody))
            if has_keys:
                document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"key": []}]
        return generate()

    app.openapi = openapi  # type: ignore[method-assign]


def _add_probes(
    app: FastAPI, service: Service, registry: EngineRegistry, supervisor: Supervisor | None
) -> None:
    @app.get("/health", tags=["probes"])
    async def health() -> Health:
        """Live: the process answers."""
        return Health()

    @app.get("/ready", tags=["probes"], response_model=Ready, responses=error_responses(Unavailable))
    async def ready(request: Request) -> Ready | JSONResponse:
        """Ready: an engine is there and work is taken; 503 says why not, to an operator where there are
        keys."""
        reason = unready_reason(service, registry, supervisor)
        if reason is not None:
            return error_response(Unavailable(reason if caller_of(request).is_operator else _NOT_READY))
        return Ready(
            engines=len(registry.alive), stalled=registry.stalled if caller_of(request).is_operator else []
        )


def _add_metrics(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/metrics", tags=["probes"], response_class=PlainTextResponse)
    async def page(request: Request) -> Response:
        """Counters and gauges in Prometheus' text format, or in OpenMetrics' if the request prefers it."""
        scraped = await run_in_slices(metrics.scraping(request.headers.get("accept", "")))
        return Response(scraped.content, media_type=scraped.content_type)
