"""Bodies of the OpenAI-compatible routes, as far as this version implements them.

What is not implemented is refused by name unless its value is the neutral one, so that a client never
believes a parameter was obeyed that was not.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .. import wire
from ..errors import InvalidRequest, UnsupportedParameter

_MAX_STOPS = 16
_HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class StreamOptions(BaseModel):
    """``include_usage`` asks for a last chunk with the token counts."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class _OpenAIRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str
    max_tokens: int | None = Field(default=None, ge=1, le=2**20)
    temperature: float | None = Field(default=None, ge=0.0, le=10.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False

    def refuse_unsupported(self) -> None:
        """Raise :class:`UnsupportedParameter` for the first parameter that would change the answer."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _HARMLESS or value in _NEUTRAL.get(name, ()):
                continue
            raise UnsupportedParameter(
                f"{name} = {value!r:.100} is not supported by this version", param=name
            )

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int) -> wire.Sampling:
        """How the answer is decoded; the temperature's default is OpenAI's, 1."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > _MAX_STOPS or not all(0 < len(text) <= 256 for text in stop):
            raise InvalidRequest(f"stop: at most {_MAX_STOPS} texts of 1 to 256 characters", param="stop")
        return wire.Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop=tuple(stop),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(_OpenAIRequest):
    """``POST /v1/completions``. Control strings in the prompt become control tokens; ids are taken as is."""

    prompt: str | list[str] | list[int] | list[list[int]]


class TextPart(BaseModel):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; its content is literal text, in which control strings stay text."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(_OpenAIRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**20)

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for message in self.messages:
            for name, value in (message.model_extra or {}).items():
                if value not in (None, []) and name != "name":
                    raise UnsupportedParameter(
                        f"messages.{name} is not supported by this version", param=f"messages.{name}"
                    )


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

    index: int = 0
    text: str
    finish_reason: wire.FinishReason | None
    logprobs: None = None


class Completion(BaseModel):
    """Answer of ``/v1/completions``; in a stream, one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class AnswerMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int = 0
    message: AnswerMessage
    finish_reason: wire.FinishReason
    logprobs: None = None


class ChatCompletion(BaseModel):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
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

    index: int = 0
    delta: Delta
    finish_reason: wire.FinishReason | None
    logprobs: None = None


class ChatChunk(BaseModel):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A model that can be asked for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "parrot"


class ModelList(BaseModel):
    """Answer of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
