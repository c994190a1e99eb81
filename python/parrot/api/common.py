"""What all bodies have in common: their base, and the types of names and ids."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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
