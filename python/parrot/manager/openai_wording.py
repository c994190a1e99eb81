"""How the two OpenAI-compatible routes word what a request's calls gave."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel

from .. import wire
from .logprobs import GeneratedId
from .openai_answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ContentLogprob,
    Delta,
    TopLogprob,
    Usage,
)

Likelihoods = Sequence[GeneratedId] | None  # None: not asked for


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the answers of a request. ``first`` is the text of an id before those of ``logprobs`` that has
    no probability: the first one of an echoed prompt."""

    text: str
    reason: wire.FinishReason
    logprobs: Likelihoods
    first: str | None = None


class Wording(Protocol):
    """How one route words its answer."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> BaseModel:
        """The answers in one piece."""

    def opening(self, index: int, /) -> list[BaseModel]:
        """Events of a stream before the first text of an answer."""

    def piece(self, index: int, text: str, logprobs: Likelihoods) -> BaseModel:
        """One event of a stream: more text of one answer."""

    def end(self, index: int, reason: wire.FinishReason) -> BaseModel:
        """The last event of one answer."""

    def usage(self, usage: Usage) -> BaseModel:
        """The event after the last, which has no choices."""


class CompletionWording:
    """Answers of ``/v1/completions``."""

    def __init__(self, model: str) -> None:
        self._id, self._created, self._model = f"cmpl-{secrets.token_hex(12)}", int(time.time()), model
        self._offsets: dict[int, int] = defaultdict(int)  # by answer, characters that have gone out

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Completion:
        """See :class:`Wording`."""
        choices = [self._choice(i, a.text, a.reason, a.logprobs, a.first) for i, a in enumerate(answers)]
        return self._completion(choices, usage)

    def opening(self, _index: int, /) -> list[BaseModel]:
        """See :class:`Wording`."""
        return []

    def piece(self, index: int, text: str, logprobs: Likelihoods) -> Completion:
        """See :class:`Wording`."""
        return self._completion([self._choice(index, text, None, logprobs)])

    def end(self, index: int, reason: wire.FinishReason) -> Completion:
        """See :class:`Wording`."""
        return self._completion([self._choice(index, "", reason, None)])

    def usage(self, usage: Usage) -> Completion:
        """See :class:`Wording`."""
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        body = Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices
        )
        return body if usage is None else body.model_copy(update={"usage": usage})

    def _choice(
        self,
        index: int,
        text: str,
        reason: wire.FinishReason | None,
        logprobs: Likelihoods,
        first: str | None = None,
    ) -> CompletionChoice:
        words = None if logprobs is None else self._logprobs(index, logprobs, first)
        return CompletionChoice(index=index, text=text, finish_reason=reason, logprobs=words)

    def _logprobs(self, index: int, entries: Sequence[GeneratedId], first: str | None) -> CompletionLogprobs:
        unscored = [] if first is None else [first]
        tokens = [*unscored, *(entry.text for entry in entries)]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[*(None for _ in unscored), *(entry.logprob for entry in entries)],
            top_logprobs=[*(None for _ in unscored), *(_by_text(entry) for entry in entries)],
            text_offset=offsets,
        )


def _by_text(entry: GeneratedId) -> dict[str, float]:
    """The alternatives by text, and the generated id itself if it is none of them, as OpenAI does it. Of ids
    with the same text the likeliest counts."""
    found: dict[str, float] = {}
    for one in (*entry.top, entry) if entry.top else ():
        found.setdefault(one.text, one.logprob)
    return found


class ChatWording:
    """Answers of ``/v1/chat/completions``."""

    def __init__(self, model: str) -> None:
        self._id, self._created, self._model = f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), model

    def whole(self, answers: Sequence[Answer], usage: Usage) -> ChatCompletion:
        """See :class:`Wording`."""
        choices = [
            ChatChoice(
                index=index,
                message=AnswerMessage(role="assistant", content=answer.text, refusal=None),
                finish_reason=answer.reason,
                logprobs=_chat_logprobs(answer.logprobs),
            )
            for index, answer in enumerate(answers)
        ]
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )

    def opening(self, index: int, /) -> list[BaseModel]:
        """See :class:`Wording`."""
        return [self._chunk(index, Delta(role="assistant", content=""))]

    def piece(self, index: int, text: str, logprobs: Likelihoods) -> ChatChunk:
        """See :class:`Wording`."""
        return self._chunk(index, Delta(content=text), logprobs=logprobs)

    def end(self, index: int, reason: wire.FinishReason) -> ChatChunk:
        """See :class:`Wording`."""
        return self._chunk(index, Delta(), reason)

    def usage(self, usage: Usage) -> ChatChunk:
        """See :class:`Wording`."""
        return self._body([]).model_copy(update={"usage": usage})

    def _chunk(
        self,
        index: int,
        delta: Delta,
        reason: wire.FinishReason | None = None,
        logprobs: Likelihoods = None,
    ) -> ChatChunk:
        words = _chat_logprobs(logprobs)
        return self._body([ChatChunkChoice(index=index, delta=delta, finish_reason=reason, logprobs=words)])

    def _body(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
        )


def _chat_logprobs(entries: Likelihoods) -> ChatLogprobs | None:
    if entries is None:
        return None
    content = [
        ContentLogprob(
            token=entry.text,
            logprob=entry.logprob,
            bytes=list(entry.token),
            top_logprobs=[
                TopLogprob(token=one.text, logprob=one.logprob, bytes=list(one.token)) for one in entry.top
            ],
        )
        for entry in entries
    ]
    return ChatLogprobs(content=content, refusal=None)
