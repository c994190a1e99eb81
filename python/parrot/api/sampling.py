"""How one output is decoded, as a body says it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from .common import FIRST_ONLY, MAX_BIASES, Body, FewBiases, Flag

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Choice = Annotated[str, Field(min_length=1, max_length=4096)]
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_SCHEMA_DEPTH = 64


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class SamplingBody(Body):
    """How one output is decoded, in OpenAI's and vLLM's words (docs/sampling.md). ``max_tokens`` None: the
    service's default. At most one of ``schema`` (JSON that is valid under it), ``regex`` (the whole
    text matches) and ``choices`` (the text is one of them) constrains the text."""

    model_config = ConfigDict(populate_by_name=True)

    max_tokens: int | None = Field(default=None, ge=1, le=2**20)
    temperature: float = Field(default=0.0, ge=0.0, le=10.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, lt=2**31)  # 0 and -1: off
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=1e-6, le=10.0)
    logit_bias: Annotated[dict[TokenId, Bias], FewBiases] = Field(default_factory=dict, max_length=MAX_BIASES)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[Stop, ...], FIRST_ONLY] = Field(default=(), max_length=16)
    stop_token_ids: Annotated[tuple[TokenId, ...], FIRST_ONLY] = Field(default=(), max_length=128)
    min_tokens: int = Field(default=0, ge=0, le=2**20)
    ignore_eos: Flag = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)  # alternatives beside each id's own
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)  # not in a session
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    regex: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None
    choices: Annotated[tuple[Choice, ...], FIRST_ONLY, Field(min_length=1, max_length=4096)] | None = None

    @field_validator("min_tokens")
    @classmethod
    def _not_above_max_tokens(cls, value: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens")
        if max_tokens is not None and value > max_tokens:
            raise ValueError(f"it is above max_tokens = {max_tokens}; lower it")
        return value

    @field_validator("json_schema")
    @classmethod
    def _not_too_deep(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        level: list[Any] = [value]
        for _ in range(MAX_SCHEMA_DEPTH):
            level = [inner for outer in level for inner in _inside(outer)]
            if not level:
                return value
        raise ValueError(f"it is nested more than {MAX_SCHEMA_DEPTH} deep; use $defs and $ref")

    @field_validator("json_schema", "regex", "choices")
    @classmethod
    def _alone(cls, value: Any, info: ValidationInfo) -> Any:
        """A constraint says itself where the text ends, so nothing else may cut it or go on after it."""
        if value is None:
            return value
        for name in ("json_schema", "regex", "stop", "stop_token_ids", "min_tokens", "ignore_eos"):
            if info.data.get(name):
                shown = "schema" if name == "json_schema" else name
                raise ValueError(f"it cannot be combined with {shown}; leave one of them out")
        return value
