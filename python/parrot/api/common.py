"""What all bodies have in common: their base, and the types of names and ids."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

_MAX_FIELDS = 64  # of one object; none has as many


class _FirstOnly(FailFast):
    """Unlike pydantic's it can be part of a union."""

    __hash__ = object.__hash__


# Of a list: what is wrong is said of its first bad item. A body of some MB may have a million, and to say it
# of each takes a minute.
FIRST_ONLY = _FirstOnly()
MAX_BIASES = 1024


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"it has {len(biases)} entries, the limit is {MAX_BIASES}")
    return biases


FewBiases = BeforeValidator(_few)  # counted before each is looked at

# Any constraint makes pydantic refuse half surrogate pairs, which JSON can carry and UTF-8 cannot.
Text = Annotated[str, Field(min_length=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,127}$")]
VarId = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]
RequestId = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]
SessionId = Annotated[str, Field(pattern=r"^s-[0-9a-f]{32}$")]
Criteria = Literal["LATENCY", "THROUGHPUT", "TTFT", "TPOT", "DEADLINE"]
Flag = Annotated[bool, Field(strict=True)]  # not "yes", "0" or 1, which pydantic would read as one
TargetMs = Annotated[float, Field(gt=0.0, le=86_400_000.0)]


class Body(BaseModel):
    """Base of all bodies: frozen, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            raise ValueError(f"it has {len(value)} fields, more than there are")
        return value
