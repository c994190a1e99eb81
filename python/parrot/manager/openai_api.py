"""OpenAI-compatible routes: each request is a one-call session whose objective is LATENCY."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from .. import errors, wire
from ..api import ErrorReply, SamplingBody
from ..grammars import check_grammar
from ..tokenizer import EncodedPrompt, Piece
from .auth import tenant_of
from .call import Role
from .disconnect import unless_disconnected
from .echo import Echo
from .holes import make_grammar
from .http_errors import error_detail, error_responses
from .json_body import JsonRoute
from .logprobs import GeneratedId, read_logprobs
from .openai_answers import ChatCompletion, Completion, ModelCard, ModelList, Usage
from .openai_bodies import MAX_ANSWERS, ChatRequest, CompletionRequest, OpenAIRequest
from .openai_wording import Answer, ChatWording, CompletionWording, Wording
from .service import Service
from .single import End, Pieces, SingleCall, pieces_of

Prompt = list[Piece] | list[int]
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
        """Continue a prompt, or each of several."""
        body.refuse_unsupported()
        service.check_model(body.model)
        max_tokens = _COMPLETION_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
        asked = [(prompt, body.samplings(max_tokens)) for prompt in _completion_prompts(body)]
        echoes = [Echo(prompt, alone=body.max_tokens == 0) for prompt, _ in asked] if body.echo else None
        return await _answer(request, service, asked, CompletionWording(body.model), body, echoes)

    @router.post("/chat/completions", response_model=ChatCompletion, responses=_ANSWERS)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Continue a chat."""
        body.refuse_unsupported()
        service.check_model(body.model)
        prompt = service.executor.prompts.chat_pieces(
            (_role(message.role), message.text) for message in body.messages
        )
        max_tokens = body.max_completion_tokens or body.max_tokens or service.config.default_max_tokens
        asked = [(prompt, body.samplings(max_tokens))]
        return await _answer(request, service, asked, ChatWording(body.model), body)

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


def _completion_prompts(body: CompletionRequest) -> list[Prompt]:
    """Each a text, whose control strings are control tokens, or ids. Raises :class:`InvalidRequest`."""
    given = body.prompt
    ids = [] if isinstance(given, str) else [one for one in given if isinstance(one, int)]
    several = [given] if isinstance(given, str) else [ids] if ids else given
    if not several:
        raise errors.InvalidRequest("the prompt is empty", param="prompt")
    if len(several) * (body.n or 1) > MAX_ANSWERS:
        raise errors.InvalidRequest(
            f"{len(several)} prompts with n = {body.n or 1} are more than {MAX_ANSWERS} answers; "
            "ask for fewer in one request",
            param="prompt",
        )
    texts = [[Piece(one, control=True)] for one in several if isinstance(one, str)]
    return [*texts, *(one for one in several if isinstance(one, list))]


async def _answer(
    request: Request,
    service: Service,
    asked: Sequence[tuple[Prompt, list[SamplingBody]]],
    wording: Wording,
    body: OpenAIRequest,
    echoes: list[Echo] | None = None,
) -> Response:
    """The n answers to each prompt, those of the first one first; ``echoes`` has one for each prompt."""
    num_each = len(asked[0][1])
    sampling = asked[0][1][0]  # but for the seed, all are alike
    service.check_sampling(sampling, grammar_param="response_format")
    await unless_disconnected(request, _check_grammar(sampling))
    tenant = tenant_of(request)
    encoding = _encoded(service, [prompt for prompt, _ in asked], sampling.max_tokens, tenant)
    fills = await unless_disconnected(request, encoding)
    pieces: Pieces = asyncio.Queue()
    calls = [(fill, one) for fill, (_, samplings) in zip(fills, asked, strict=True) for one in samplings]
    singles = service.start_singles(calls, pieces, stream=bool(body.stream), tenant=tenant)

    def end() -> None:
        for single in singles:
            service.end_single(single)

    try:
        _raise_refusals(singles)
    except errors.ParrotError:
        end()
        raise
    if body.stream:
        with_usage = (lambda: _usage(singles, num_each)) if body.wants_usage else None
        return _EventStream(_events(service, singles, pieces, wording, with_usage), end)
    try:
        answers = await unless_disconnected(request, _answers(service, singles, pieces))
    finally:
        end()
    usage = _usage(singles, num_each)
    if echoes is not None:
        answers = _echoed(service, echoes, fills, singles, answers)
        usage = Usage.of(usage.prompt_tokens, 0, 0) if echoes[0].alone else usage
    answer = wording.whole(answers, usage)
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


async def _encoded(
    service: Service, prompts: Sequence[Prompt], max_tokens: int | None, tenant: str
) -> list[EncodedPrompt]:
    """An error names the prompt, where there are several."""
    fills = []
    for index, prompt in enumerate(prompts):
        try:
            fills.append(await service.encode(prompt, max_tokens or 1, tenant=tenant))
        except errors.ParrotError as error:
            if len(prompts) > 1:
                error.param = f"prompt[{index}]"
            raise
        await asyncio.sleep(0)  # a short text is encoded at once
    return fills


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


def _echoed(
    service: Service,
    echoes: Sequence[Echo],
    fills: Sequence[EncodedPrompt],
    singles: Sequence[SingleCall],
    answers: Sequence[Answer],
) -> list[Answer]:
    """The first call of each prompt has scored that."""
    num_each = len(singles) // len(echoes)
    return [
        echoes[i // num_each].before(
            answer, service, singles[i - i % num_each], fills[i // num_each].token_ids
        )
        for i, answer in enumerate(answers)
    ]


def _likelihoods(service: Service, logprobs: wire.Logprobs | None) -> list[GeneratedId] | None:
    return None if logprobs is None else read_logprobs(logprobs, service.token_bytes)


def _usage(singles: Sequence[SingleCall], num_each: int) -> Usage:
    """Of all prompts. The ``num_each`` answers to one share it; it counts once, with what was in the cache
    before them."""
    calls = [single.call for single in singles]
    by_prompt = [calls[first : first + num_each] for first in range(0, len(calls), num_each)]
    return Usage.of(
        sum(group[0].prompt_tokens for group in by_prompt),
        sum(call.output_tokens for call in calls),
        sum(min(call.cached_tokens for call in group) for group in by_prompt),
    )


async def _events(
    service: Service,
    singles: Sequence[SingleCall],
    pieces: Pieces,
    wording: Wording,
    usage: Callable[[], Usage] | None,
) -> AsyncIterator[str]:
    """Server-sent events: the texts, each with its finish_reason, ``usage`` with no choices, [DONE]."""
    try:
        for single in singles:
            for opening in wording.opening(single.index):
                yield _event(opening)
        async for piece in pieces_of(singles, pieces):
            if isinstance(piece, End):
                yield _event(wording.end(piece.index, singles[piece.index].finish_reason))
            else:
                yield _event(wording.piece(piece.index, piece.text, _likelihoods(service, piece.logprobs)))
        if usage is not None:
            yield _event(wording.usage(usage()))
    except errors.ParrotError as error:
        yield _event(ErrorReply(error=error_detail(_as_asked(error).to_info())))
    yield "data: [DONE]\n\n"


def _event(body: BaseModel) -> str:
    return f"data: {body.model_dump_json(exclude_unset=True)}\n\n"


class _EventStream(StreamingResponse):
    """Calls ``on_end``, perhaps twice, when the client leaves, also before its first event, and when the
    stream is over. It does not rely on being cancelled: anyio cancels a task that waits, and when anyio looks
    this one never does, if on a busy machine each turn of the loop has its next event."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                self._on_end()
            return message

        try:
            await super().__call__(scope, watched, send)
        finally:
            self._on_end()
