"""Answers of the OpenAI-compatible routes, whole and in pieces.

They are serialised with ``exclude_unset``: a null that was set is sent (``finish_reason`` of a piece), a
field that was not set is absent (``usage`` of a piece), as OpenAI does it.
"""

from __future__ import annotations

import secrets
import time
from typing import Literal, Protocol

from pydantic import BaseModel

from .. import wire


class PromptTokensDetails(BaseModel):
    """Prompt tokens whose KV was found in a cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        """Usage from three counts."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


class CompletionChoice(BaseModel):
    """One answer, or in a stream a piece of it."""

    index: int
    text: str
    finish_reason: wire.FinishReason | None
    logprobs: None


class Completion(BaseModel):
    """Answer of ``/v1/completions``; in a stream, one chunk of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class AnswerMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: wire.FinishReason
    logprobs: None


class ChatCompletion(BaseModel):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """A piece of an answer."""

    index: int
    delta: Delta
    finish_reason: wire.FinishReason | None
    logprobs: None


class ChatChunk(BaseModel):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A model that can be asked for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """Answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class Wording(Protocol):
    """How one route words its answer."""

    def whole(self, text: str, reason: wire.FinishReason, usage: Usage) -> BaseModel:
        """The answer in one piece."""

    def opening(self) -> list[BaseModel]:
        """Events of a stream before the first text."""

    def piece(self, text: str | None, reason: wire.FinishReason | None) -> BaseModel:
        """One event of a stream; the last has the reason."""

    def usage(self, usage: Usage) -> BaseModel:
        """The event after the last, which has no choices."""


class CompletionWording:
    """Answers of ``/v1/completions``."""

    def __init__(self, model: str) -> None:
        self._id, self._created, self._model = f"cmpl-{secrets.token_hex(12)}", int(time.time()), model

    def whole(self, text: str, reason: wire.FinishReason, usage: Usage) -> Completion:
        """See :class:`Wording`."""
        return self._completion([_text_choice(text, reason)], usage)

    def opening(self) -> list[BaseModel]:
        """See :class:`Wording`."""
        return []

    def piece(self, text: str | None, reason: wire.FinishReason | None) -> Completion:
        """See :class:`Wording`."""
        return self._completion([_text_choice(text or "", reason)])

    def usage(self, usage: Usage) -> Completion:
        """See :class:`Wording`."""
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        body = Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices
        )
        return body if usage is None else body.model_copy(update={"usage": usage})


def _text_choice(text: str, reason: wire.FinishReason | None) -> CompletionChoice:
    return CompletionChoice(index=0, text=text, finish_reason=reason, logprobs=None)


class ChatWording:
    """Answers of ``/v1/chat/completions``."""

    def __init__(self, model: str) -> None:
        self._id, self._created, self._model = f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), model

    def whole(self, text: str, reason: wire.FinishReason, usage: Usage) -> ChatCompletion:
        """See :class:`Wording`."""
        message = AnswerMessage(role="assistant", content=text, refusal=None)
        choice = ChatChoice(index=0, message=message, finish_reason=reason, logprobs=None)
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[choice],
            usage=usage,
        )

    def opening(self) -> list[BaseModel]:
        """See :class:`Wording`."""
        return [self._chunk(_delta_choices(Delta(role="assistant", content=""), None))]

    def piece(self, text: str | None, reason: wire.FinishReason | None) -> ChatChunk:
        """See :class:`Wording`."""
        return self._chunk(_delta_choices(Delta() if text is None else Delta(content=text), reason))

    def usage(self, usage: Usage) -> ChatChunk:
        """See :class:`Wording`."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        body = ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
        )
        return body if usage is None else body.model_copy(update={"usage": usage})


def _delta_choices(delta: Delta, reason: wire.FinishReason | None) -> list[ChatChunkChoice]:
    return [ChatChunkChoice(index=0, delta=delta, finish_reason=reason, logprobs=None)]
