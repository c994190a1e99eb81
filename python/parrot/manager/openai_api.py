"""OpenAI-compatible routes: each request is a one-call session whose objective is LATENCY."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from .. import errors
from ..api import ErrorReply, SamplingBody
from ..tokenizer import Piece
from .call import Role
from .disconnect import unless_disconnected
from .http_errors import error_detail, error_responses
from .openai_answers import (
    ChatCompletion,
    ChatWording,
    Completion,
    CompletionWording,
    ModelCard,
    ModelList,
    Usage,
    Wording,
)
from .openai_bodies import ChatRequest, CompletionRequest, OpenAIRequest
from .service import Service
from .single import SingleCall

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for this route
_ERRORS = error_responses(
    errors.InvalidRequest,
    errors.UnsupportedParameter,
    errors.PromptTooLong,
    errors.ModelNotFound,
    errors.RequestTooLarge,
    errors.Overloaded,
    errors.EngineError,
    errors.EngineLost,
    errors.Unavailable,
)


def openai_router(service: Service) -> APIRouter:
    """The three routes around one service."""
    router = APIRouter(prefix="/v1", tags=["openai"])
    started = int(time.time())

    @router.get("/models")
    async def models() -> ModelList:
        """The model that this service serves."""
        return ModelList(
            object="list",
            data=[ModelCard(id=service.config.model, object="model", created=started, owned_by="parrot")],
        )

    @router.post("/completions", response_model=Completion, responses=_ERRORS)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue a prompt."""
        body.refuse_unsupported()
        service.check_model(body.model)
        prompt = _completion_prompt(body)
        wording = CompletionWording(body.model)
        sampling = body.sampling(body.max_tokens or _COMPLETION_MAX_TOKENS)
        return await _answer(request, service, prompt, sampling, wording, body)

    @router.post("/chat/completions", response_model=ChatCompletion, responses=_ERRORS)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Continue a chat."""
        body.refuse_unsupported()
        service.check_model(body.model)
        prompt = service.executor.prompts.chat_pieces(
            (_role(message.role), message.text) for message in body.messages
        )
        wording = ChatWording(body.model)
        max_tokens = body.max_completion_tokens or body.max_tokens or service.config.default_max_tokens
        return await _answer(request, service, prompt, body.sampling(max_tokens), wording, body)

    return router


def _role(role: str) -> Role:
    match role:
        case "system" | "developer":
            return "system"
        case "user":
            return "user"
        case "assistant":
            return "assistant"
        case _:
            return "tool"


def _completion_prompt(body: CompletionRequest) -> list[Piece] | list[int]:
    """Text, whose control strings are control tokens, or ids."""
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return [Piece(prompt, control=True)]
    ids = [token for token in prompt if isinstance(token, int)]
    if not prompt:
        raise errors.InvalidRequest("the prompt is empty", param="prompt")
    if len(ids) != len(prompt):
        raise errors.UnsupportedParameter("several prompts in one request are not supported", param="prompt")
    return ids


async def _answer(
    request: Request,
    service: Service,
    prompt: list[Piece] | list[int],
    sampling: SamplingBody,
    wording: Wording,
    body: OpenAIRequest,
) -> Response:
    fill = await unless_disconnected(request, service.encode(prompt, sampling.max_tokens or 1))
    single = service.start_single(fill, sampling, stream=bool(body.stream))
    if body.stream:
        events = _events(single, wording, with_usage=body.wants_usage)
        return _EventStream(events, lambda: service.end_single(single))
    try:
        await unless_disconnected(request, single.variable.wait())
        text = single.variable.result()
    finally:
        service.end_single(single)
    answer = wording.whole(text, single.finish_reason, _usage(single))
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


def _usage(single: SingleCall) -> Usage:
    call = single.call
    return Usage.of(call.prompt_tokens, call.output_tokens, call.cached_tokens)


async def _events(single: SingleCall, wording: Wording, *, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events: the text, finish_reason, usage with no choices, [DONE]."""
    try:
        for opening in wording.opening():
            yield _event(opening)
        async for piece in single.pieces():
            yield _event(wording.piece(piece, None))
        yield _event(wording.piece(None, single.finish_reason))
        if with_usage:
            yield _event(wording.usage(_usage(single)))
    except errors.ParrotError as error:
        yield _event(ErrorReply(error=error_detail(error.to_info())))
    yield "data: [DONE]\n\n"


def _event(body: BaseModel) -> str:
    return f"data: {body.model_dump_json(exclude_unset=True)}\n\n"


class _EventStream(StreamingResponse):
    """Calls ``on_end`` when the stream is over, also if the client leaves before its first event."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
