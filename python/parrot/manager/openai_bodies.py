"""Bodies of the OpenAI-compatible routes, as far as this version implements them.

What is not implemented is refused by name unless its value is the neutral one, so that a client never
believes a parameter was obeyed that was not. Beside OpenAI's own, vLLM's sampling parameters are taken.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..api import FIRST_ONLY, MAX_LOGPROBS, FewBiases, SamplingBody, Stop, Text
from ..errors import InvalidRequest, UnsupportedParameter
from .http_errors import invalid_request

MAX_ANSWERS = 128
_MAX_NAME = 64  # of a parameter that nobody knows
_SEED_BITS = 62
_HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
}
# Fields that are those of SamplingBody by name and meaning; what they may be is checked there.
_SAME = (
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "stop_token_ids", "min_tokens", "ignore_eos"),
)
TopLogprobs = Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)]


class StreamOptions(BaseModel):
    """``include_usage`` asks for a last chunk with the token counts."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class JsonSchemaFormat(BaseModel):
    """A JSON schema that the answer must be valid under. It is always enforced, ``strict`` or not."""

    model_config = ConfigDict(extra="forbid")
    name: Text = ""
    description: Text | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(BaseModel):
    """Any text."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["json_object"]


class SchemaFormat(BaseModel):
    """JSON under a schema."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]


class OpenAIRequest(BaseModel):
    """What both routes take."""

    model_config = ConfigDict(extra="allow")

    model: Text
    max_tokens: int | None = Field(default=None, ge=1, le=2**20)
    n: int | None = Field(default=None, ge=1, le=MAX_ANSWERS)
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], FewBiases] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], FIRST_ONLY, Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], FIRST_ONLY] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def refuse_unsupported(self) -> None:
        """Raise :class:`UnsupportedParameter` for the first parameter that would change the answer."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _HARMLESS or _is_neutral(name, value):
                continue
            shown = _shown(name)
            raise UnsupportedParameter(
                f"{shown} = {value!r:.100} is not supported by this version", param=shown
            )
        if self.best_of not in (None, self.n or 1):
            raise UnsupportedParameter(
                f"best_of = {self.best_of} is not supported; leave it out and choose among n answers",
                param="best_of",
            )

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the ids of the prompt."""
        return None

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many alternatives to log for each id; None: no log-probabilities."""

    def samplings(self, max_tokens: int) -> list[SamplingBody]:
        """How each of the n answers is decoded: their seeds are consecutive. The temperature's default is
        OpenAI's, 1. Raises :class:`InvalidRequest` naming the parameter."""
        fields = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        temperature = 1.0 if self.temperature is None else self.temperature
        seed = self.seed
        if seed is None and temperature > 0:
            # So that a call that runs again after its engine's loss repeats itself.
            seed = secrets.randbits(_SEED_BITS)
        fields |= {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or [],
            "logprobs": self.num_logprobs,
            "schema": self._schema(),
        }
        try:
            return [
                SamplingBody.model_validate(
                    {
                        **fields,
                        "seed": seed if seed is None else seed + index,
                        "prompt_logprobs": self.num_prompt_logprobs if index == 0 else None,
                    }
                )
                for index in range(self.n or 1)
            ]
        except ValidationError as error:
            refusal = invalid_request(error.errors())
            if refusal.param == "schema":
                refusal = InvalidRequest(f"response_format: {refusal.message}", param="response_format")
            raise refusal from None

    def _schema(self) -> dict[str, Any] | None:
        match self.response_format:
            case JsonObjectFormat():
                return {"type": "object"}
            case SchemaFormat(json_schema=wanted):
                return wanted.json_schema
            case _:
                return None


def _shown(name: str) -> str:
    """A parameter's name as an error repeats it."""
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..."


def _is_neutral(name: str, value: object) -> bool:
    """Whether a parameter says what happens anyway; 0 is not False here."""
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _NEUTRAL.get(name, ())
    )


TokenId = Annotated[int, Field(strict=True)]  # true is not 1


class CompletionRequest(OpenAIRequest):
    """``POST /v1/completions``. Control strings in the prompt become control tokens; ids are taken as is."""

    prompt: (
        Text
        | Annotated[list[Text], FIRST_ONLY]
        | Annotated[list[TokenId], FIRST_ONLY]
        | Annotated[list[Annotated[list[TokenId], FIRST_ONLY]], FIRST_ONLY]
    )
    logprobs: TopLogprobs | None = None
    echo: Annotated[bool, Field(strict=True)] | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=2**20)  # 0, the prompt alone, needs echo

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens = 0 leaves nothing to answer; set echo too", param="max_tokens")
        if self.echo and self.stream:
            raise UnsupportedParameter(
                "echo is not supported in a stream; ask without stream, or without echo", param="echo"
            )


class TextPart(BaseModel):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """One message; its content is literal text, in which control strings stay text."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], FIRST_ONLY, Field(min_length=1)]

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(OpenAIRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], FIRST_ONLY, Field(min_length=1, max_length=4096)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**20)
    logprobs: Annotated[bool, Field(strict=True)] | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs = true; set it too", param="top_logprobs")
        for message in self.messages:
            for name, value in (message.model_extra or {}).items():
                if value not in (None, []) and name != "name":
                    raise UnsupportedParameter(
                        f"messages.{_shown(name)} is not supported by this version",
                        param=f"messages.{_shown(name)}",
                    )
