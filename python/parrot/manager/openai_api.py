"""OpenAI-compatible routes: each request is a one-call session whose objective is LATENCY."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from .. import errors, wire
from ..api import ErrorReply, SamplingBody
from ..grammars import check_grammar
from ..tokenizer import Piece
from .auth import tenant_of
from .call import Role
from .disconnect import unless_disconnected
from .echo import Echo
from .holes import make_grammar
from .http_errors import error_detail, error_responses
from .json_body import JsonRoute
from .logprobs import GeneratedId, read_logprobs
from .openai_answers import ChatCompletion, Completion, ModelCard, ModelList, Usage
from .openai_bodies import ChatRequest, CompletionRequest, OpenAIRequest
from .openai_wording import Answer, ChatWording, CompletionWording, Wording
from .service import Service
from .single import End, Pieces, SingleCall, pieces_of

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

_ANSWERS = {200: {"content": {"text/event-stream": {}}}, **_ERRORS}  # with "stream": true


def openai_router(service: Service) -> APIRouter:
    """The three routes around one service."""
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=JsonRoute)
    started = int(time.time())

    @router.get("/models")
    async def models() -> ModelList:
        """The model that this service serves."""
        return ModelList(
            object="list",
            data=[ModelCard(id=service.config.model, object="model", created=started, owned_by="parrot")],
        )

    @router.post("/completions", response_model=Completion, responses=_ANSWERS)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue a prompt."""
        body.refuse_unsupported()
        service.check_model(body.model)
        prompt = _completion_prompt(body)
        wording = CompletionWording(body.model)
        max_tokens = _COMPLETION_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
        samplings = body.samplings(max_tokens)
        echo = Echo(prompt, alone=body.max_tokens == 0) if body.echo else None
        return await _answer(request, service, prompt, samplings, wording, body, echo)

    @router.post("/chat/completions", response_model=ChatCompletion, responses=_ANSWERS)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Continue a chat."""
        body.refuse_unsupported()
        service.check_model(body.model)
        prompt = service.executor.prompts.chat_pieces(
            (_role(message.role), message.text) for message in body.messages
        )
        wording = ChatWording(body.model)
        max_tokens = body.max_completion_tokens or body.max_tokens or service.config.default_max_tokens
        return await _answer(request, service, prompt, body.samplings(max_tokens), wording, body)

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
    samplings: list[SamplingBody],
    wording: Wording,
    body: OpenAIRequest,
    echo: Echo | None = None,
) -> Response:
    service.check_sampling(samplings[0], grammar_param="response_format")
    await unless_disconnected(request, _check_grammar(samplings[0]))
    tenant = tenant_of(request)
    encoding = service.encode(prompt, samplings[0].max_tokens or 1, tenant=tenant)
    fill = await unless_disconnected(request, encoding)
    pieces: Pieces = asyncio.Queue()
    singles = service.start_singles(fill, samplings, pieces, stream=bool(body.stream), tenant=tenant)

    def end() -> None:
        for single in singles:
            service.end_single(single)

    try:
        _raise_refusals(singles)
    except errors.ParrotError:
        end()
        raise
    if body.stream:
        return _EventStream(_events(service, singles, pieces, wording, with_usage=body.wants_usage), end)
    try:
        answers = await unless_disconnected(request, _answers(service, singles, pieces))
    finally:
        end()
    usage = _usage(singles)
    if echo is not None:
        answers = [echo.before(answer, service, singles[0], fill.token_ids) for answer in answers]
        usage = Usage.of(usage.prompt_tokens, 0, 0) if echo.alone else usage
    answer = wording.whole(answers, usage)
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


async def _check_grammar(sampling: SamplingBody) -> None:
    """Raise :class:`InvalidRequest` for an impossible schema before a stream begins."""
    grammar = make_grammar(sampling)
    if grammar is not None:
        await asyncio.to_thread(check_grammar, grammar, param="response_format")


def _raise_refusals(singles: Sequence[SingleCall]) -> None:
    """Raise the error of a call that ended as it was queued, before a stream has its status."""
    for single in singles:
        if single.call.ended:
            single.variable.result()


def _as_asked(error: errors.ParrotError) -> errors.ParrotError:
    """An engine's refusal of a schema, named as these routes' clients gave it."""
    if isinstance(error, errors.InvalidRequest) and error.param == "schema":
        return errors.InvalidRequest(f"response_format: {error.message}", param="response_format")
    return error


async def _answers(service: Service, singles: Sequence[SingleCall], pieces: Pieces) -> list[Answer]:
    """When all have ended; the first one that fails is the answer to the request."""
    try:
        async for _ in pieces_of(singles, pieces):
            pass
    except errors.InvalidRequest as error:
        raise _as_asked(error) from None
    return [
        Answer(single.variable.result(), single.finish_reason, _likelihoods(service, single.logprobs))
        for single in singles
    ]


def _likelihoods(service: Service, logprobs: wire.Logprobs | None) -> list[GeneratedId] | None:
    return None if logprobs is None else read_logprobs(logprobs, service.token_bytes)


def _usage(singles: Sequence[SingleCall]) -> Usage:
    """Answers share their prompt, which counts once, with what was in the cache before them."""
    calls = [single.call for single in singles]
    return Usage.of(
        calls[0].prompt_tokens,
        sum(call.output_tokens for call in calls),
        min(call.cached_tokens for call in calls),
    )


async def _events(
    service: Service, singles: Sequence[SingleCall], pieces: Pieces, wording: Wording, *, with_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events: the texts, each with its finish_reason, usage with no choices, [DONE]."""
    try:
        for single in singles:
            for opening in wording.opening(single.index):
                yield _event(opening)
        async for piece in pieces_of(singles, pieces):
            if isinstance(piece, End):
                yield _event(wording.end(piece.index, singles[piece.index].finish_reason))
            else:
                yield _event(wording.piece(piece.index, piece.text, _likelihoods(service, piece.logprobs)))
        if with_usage:
            yield _event(wording.usage(_usage(singles)))
    except errors.ParrotError as error:
        yield _event(ErrorReply(error=error_detail(_as_asked(error).to_info())))
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
