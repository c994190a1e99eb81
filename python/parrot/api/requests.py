"""Bodies that come in: variables, calls and labels of a submit, get, set and cancel."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from .common import FIRST_ONLY, Body, Criteria, Flag, Name, RequestId, SessionId, TargetMs, Text, VarId
from .sampling import SamplingBody
from .transforms import Transforms


def _check_target(criteria: Criteria | None, target_ms: float | None) -> float | None:
    has_target = criteria in ("TTFT", "TPOT", "DEADLINE")
    if has_target and target_ms is None:
        raise ValueError(f"{criteria} needs one")
    if target_ms is not None and not has_target:
        raise ValueError(f"it goes with TTFT, TPOT or DEADLINE, not with {criteria}")
    return target_ms


class SourceBody(Body):
    """One variable that a derived variable reads, and what happens to its value first."""

    semantic_var_id: VarId
    transforms: Transforms = ()


class VariableBody(Body):
    """A variable that is set (``value``), derived (``sources`` joined by ``separator``, then
    ``transforms``), or merely declared: its producer or value comes later."""

    semantic_var_id: VarId
    value: Text | None = None
    sources: Annotated[tuple[SourceBody, ...], FIRST_ONLY] | None = Field(
        default=None, min_length=1, max_length=65536
    )
    separator: str = Field(default="\n", max_length=256)
    transforms: Transforms = ()

    @model_validator(mode="after")
    def _one_origin(self) -> VariableBody:
        if self.value is not None and self.sources is not None:
            raise ValueError("a variable has a value or sources, not both")
        return self


class PlaceholderBody(Body):
    """Binds one hole of the template. An input has a ``semantic_var_id``, or a constant ``value`` (text that
    can never become a hole or a control token), or both (a new variable set to the value). An output has a
    ``semantic_var_id`` (made up by the client or, when absent, by the service) and may say how it is decoded.
    ``transforms`` apply to the value on its way in (input) or out (output)."""

    name: Name
    kind: Literal["input", "output"]
    semantic_var_id: VarId | None = None
    value: Text | None = None
    transforms: Transforms = ()
    sampling: SamplingBody | None = None


class MessageBody(Body):
    """One message of a chat prompt; ``content`` is a template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text


class CallBody(Body):
    """One call of a semantic function: ``prompt`` or ``messages``, unrendered, a binding for each hole."""

    function: Annotated[str, Field(max_length=256)] = ""
    request_id: RequestId | None = None
    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[tuple[MessageBody, ...], FIRST_ONLY] | None = Field(
        default=None, min_length=1, max_length=4096
    )
    placeholders: Annotated[tuple[PlaceholderBody, ...], FIRST_ONLY] = Field(default=(), max_length=4096)
    objective: Criteria | None = None
    target_ms: TargetMs | None = Field(default=None, validate_default=True)

    @field_validator("target_ms")
    @classmethod
    def _goes_with_criteria(cls, value: float | None, info: ValidationInfo) -> float | None:
        return _check_target(info.data.get("objective"), value)

    @model_validator(mode="after")
    def _one_prompt(self) -> CallBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a call has either a prompt or messages")
        return self


class LabelBody(Body):
    """The objective of a variable that a get will ask for: it travels with the submit, so that labels arrive
    with the graph. ``target_ms`` goes with three of them and counts from now: TTFT, the first token; TPOT,
    each token; DEADLINE, the value, which fails as ``deadline_exceeded`` after that."""

    semantic_var_id: VarId
    criteria: Criteria
    target_ms: TargetMs | None = Field(default=None, validate_default=True)

    @field_validator("target_ms")
    @classmethod
    def _goes_with_criteria(cls, value: float | None, info: ValidationInfo) -> float | None:
        return _check_target(info.data.get("criteria"), value)


class SubmitBody(Body):
    """A batch of variables, calls and labels, taken whole or refused whole. With ``create_session`` the
    client's own random ``session_id`` is created on the way (409 if it exists). A client that lost the answer
    sends the body again: with the ``submit_id`` of a submit that the session has taken, it is answered again
    and nothing runs twice."""

    session_id: SessionId
    submit_id: RequestId | None = None
    create_session: Flag = False
    variables: Annotated[tuple[VariableBody, ...], FIRST_ONLY] = ()
    calls: Annotated[tuple[CallBody, ...], FIRST_ONLY] = ()
    labels: Annotated[tuple[LabelBody, ...], FIRST_ONLY] = ()
    _text: bytes | None = PrivateAttr(default=None)

    def came_as(self, text: bytes) -> SubmitBody:
        """This body, which was read from ``text``."""
        self._text = text
        return self

    def to_json(self) -> bytes:
        """What it was read from, or else what could be."""
        return self._text or self.model_dump_json(exclude_unset=True, by_alias=True).encode()


class GetBody(Body):
    """Wait for a variable. ``timeout_ms`` 0 polls; absent waits until the variable ends. ``criteria`` and
    ``target_ms`` label it (:class:`LabelBody`). With the ``submit_id`` of the submit that declares the
    variable, or creates the session, the get may arrive before that: it is held until the submit was taken,
    within its own ``timeout_ms`` and for 20 s at most, and ends with the error that refused the submit.
    """

    session_id: SessionId
    semantic_var_id: VarId
    submit_id: RequestId | None = None
    criteria: Criteria | None = None
    target_ms: TargetMs | None = Field(default=None, validate_default=True)
    timeout_ms: int | None = Field(default=None, ge=0, le=86_400_000)

    @field_validator("target_ms")
    @classmethod
    def _goes_with_criteria(cls, value: float | None, info: ValidationInfo) -> float | None:
        return _check_target(info.data.get("criteria"), value)


class SetBody(Body):
    """Give a variable its value from outside. The same value again is taken, another one is a 409."""

    session_id: SessionId
    semantic_var_id: VarId
    value: Text


class CancelBody(Body):
    """Cancel a variable: it ends as ``cancelled`` and calls that nobody else needs stop within one step."""

    session_id: SessionId
    semantic_var_id: VarId
