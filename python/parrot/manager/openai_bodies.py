"""Bodies of the OpenAI-compatible routes, as far as this version implements them.

What is not implemented is refused by name unless its value is the neutral one, so that a client never
believes a parameter was obeyed that was not.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..api import SamplingBody, Text
from ..errors import UnsupportedParameter

Stop = Annotated[str, Field(min_length=1, max_length=256)]
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


class OpenAIRequest(BaseModel):
    """What both routes take."""

    model_config = ConfigDict(extra="allow")

    model: Text
    max_tokens: int | None = Field(default=None, ge=1, le=2**20)
    temperature: float | None = Field(default=None, ge=0.0, le=10.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False

    def refuse_unsupported(self) -> None:
        """Raise :class:`UnsupportedParameter` for the first parameter that would change the answer."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _HARMLESS or _is_neutral(name, value):
                continue
            raise UnsupportedParameter(
                f"{name} = {value!r:.100} is not supported by this version", param=name
            )

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int) -> SamplingBody:
        """How the answer is decoded; the temperature's default is OpenAI's, 1."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        temperature = 1.0 if self.temperature is None else self.temperature
        seed = self.seed
        if seed is None and temperature > 0:
            seed = secrets.randbits(
                62
            )  # so that a call that runs again after its engine's loss repeats itself
        return SamplingBody(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=seed,
            stop=tuple(stop),
            ignore_eos=self.ignore_eos,
        )


def _is_neutral(name: str, value: object) -> bool:
    """Whether a parameter says what happens anyway; ``logprobs`` 0 asks for something, though 0 == False."""
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _NEUTRAL.get(name, ())
    )


class CompletionRequest(OpenAIRequest):
    """``POST /v1/completions``. Control strings in the prompt become control tokens; ids are taken as is."""

    prompt: Text | list[Text] | list[int] | list[list[int]]


class TextPart(BaseModel):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """One message; its content is literal text, in which control strings stay text."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(OpenAIRequest):
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
