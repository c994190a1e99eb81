"""Answers of the OpenAI-compatible routes, whole and in pieces.

They are serialised with ``exclude_unset``: a null that was set is sent (``finish_reason`` of a piece), a
field that was not set is absent (``usage`` of a piece), as OpenAI does it.
"""

from __future__ import annotations

from typing import Literal

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


class CompletionLogprobs(BaseModel):
    """Log-probabilities as ``/v1/completions`` words them: parallel lists over the generated ids and, with
    ``echo``, those of the prompt, of which the first has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer, or in a stream a piece of it."""

    index: int
    text: str
    finish_reason: wire.FinishReason | None
    logprobs: CompletionLogprobs | None


class Completion(BaseModel):
    """Answer of ``/v1/completions``; in a stream, one chunk of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """One of the likeliest ids in a place."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A generated id."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat answer, or of a piece of it."""

    content: list[ContentLogprob]
    refusal: None


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
    logprobs: ChatLogprobs | None


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
    logprobs: ChatLogprobs | None


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
