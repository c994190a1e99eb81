"""The service's own routes: sessions, submit, get, set, cancel, and what can be looked at."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from .. import api, errors
from .auth import caller_of, tenant_of
from .disconnect import unless_disconnected, whole_body
from .engines import EngineRegistry
from .http_errors import error_responses
from .json_body import JsonRoute
from .service import Service
from .slices import run_in_slices
from .submit_body import documented_body, reading

_SUBMIT_ERRORS = (
    errors.InvalidRequest,
    errors.TemplateError,
    errors.UnknownPlaceholder,
    errors.CycleError,
    errors.TransformError,
    errors.SessionNotFound,
    errors.VariableNotFound,
    errors.ModelNotFound,
    errors.DoubleProducer,
    errors.DuplicateRequest,
    errors.RequestTooLarge,
    errors.Overloaded,
    errors.Unavailable,
)
_GET_ERRORS = (
    errors.InvalidRequest,
    errors.PromptTooLong,
    errors.SessionNotFound,
    errors.VariableNotFound,
    errors.Cancelled,
    errors.DeadlineExceeded,
    errors.SessionClosed,
    errors.TransformFailed,
    errors.TypedOutputFailed,
    errors.UpstreamFailed,
    errors.EngineError,
    errors.EngineLost,
    errors.Unavailable,
)
_SET_ERRORS = (
    errors.InvalidRequest,
    errors.SessionNotFound,
    errors.VariableNotFound,
    errors.DoubleProducer,
    errors.RequestTooLarge,
    errors.Unavailable,
)
_FIND_ERRORS = (errors.InvalidRequest, errors.SessionNotFound, errors.VariableNotFound)
_END_ERRORS = (*_FIND_ERRORS, errors.JournalUnavailable)


def session_router(service: Service, registry: EngineRegistry) -> APIRouter:
    """Routes around one service."""
    router = APIRouter(prefix="/v1", route_class=JsonRoute)
    _add_session_routes(router, service)
    _add_variable_routes(router, service)
    _add_views(router, service, registry)
    return router


def _add_session_routes(router: APIRouter, service: Service) -> None:
    @router.post("/session", tags=["session"], responses=error_responses(errors.Unavailable))
    async def create_session(request: Request) -> api.SessionReply:
        """A new session: one application instance with its variables and calls."""
        reply = service.create_session(tenant=tenant_of(request))
        await service.saved()
        return reply

    @router.delete(
        "/session/{session_id}", tags=["session"], status_code=204, responses=error_responses(*_END_ERRORS)
    )
    async def delete_session(request: Request, session_id: api.SessionId) -> None:
        """End a session: its calls stop, its values and contexts go."""
        service.delete_session(session_id, tenant=tenant_of(request))
        await service.saved()

    @router.post(
        "/submit",
        tags=["session"],
        response_model=api.SubmitReply,
        responses=error_responses(*_SUBMIT_ERRORS),
        openapi_extra=documented_body(api.SubmitBody),
    )
    async def submit(request: Request) -> Response:
        """Calls with unrendered prompts, and variables, taken whole or refused whole."""
        tenant = tenant_of(request)
        body = await run_in_slices(reading(await whole_body(request), service.config))
        reply = await service.submit_in_slices(body, tenant=tenant)
        await service.saved()
        return Response(reply.model_dump_json(), media_type="application/json")


def _add_variable_routes(router: APIRouter, service: Service) -> None:
    @router.post("/get", tags=["variables"], responses=error_responses(*_GET_ERRORS))
    async def get(request: Request, body: api.GetBody) -> api.GetReply:
        """Wait for a variable's value; its failure is an HTTP error."""
        return await unless_disconnected(request, service.get(body, tenant=tenant_of(request)))

    @router.post("/set", tags=["variables"], status_code=204, responses=error_responses(*_SET_ERRORS))
    async def set_value(request: Request, body: api.SetBody) -> None:
        """Give a variable its value from outside."""
        service.set_value(body, tenant=tenant_of(request))
        await service.saved()

    @router.post("/cancel", tags=["variables"], status_code=204, responses=error_responses(*_END_ERRORS))
    async def cancel(request: Request, body: api.CancelBody) -> None:
        """Cancel a variable; calls that nobody else needs stop within one engine step."""
        service.cancel(body, tenant=tenant_of(request))
        await service.saved()


def _add_views(router: APIRouter, service: Service, registry: EngineRegistry) -> None:
    @router.get("/session/{session_id}/graph", tags=["views"], responses=error_responses(*_FIND_ERRORS))
    async def graph(request: Request, session_id: api.SessionId) -> api.GraphReply:
        """The session's calls and variables, without values."""
        return service.graph(session_id, tenant=tenant_of(request))

    @router.get("/calls", tags=["views"], responses=error_responses(errors.InvalidRequest))
    async def calls(request: Request, limit: Annotated[int, Query(ge=1, le=4096)] = 256) -> api.CallsReply:
        """Recently ended calls, oldest first: the tenant's own, or all of them to an operator."""
        tenant = None if caller_of(request).is_operator else tenant_of(request)
        return api.CallsReply(calls=service.executor.history.last(limit, tenant))

    @router.get("/engines", tags=["views"])
    async def engines() -> api.EnginesReply:
        """All engines that ever registered under a name."""
        return api.EnginesReply(engines=registry.views(), scheduler=service.executor.scheduler.counters())
