"""What a caller may ask of an output: how it is decoded."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ..api import SamplingBody
from ..errors import InvalidRequest
from .typed import Typed, from_schema


def check_timeout(timeout: float | None) -> None:
    """Raise :class:`TypeError` for a timeout that is neither None nor a number of seconds."""
    if timeout is not None and (not isinstance(timeout, (int, float)) or math.isnan(timeout)):
        raise TypeError(f"timeout={timeout!r} is not a number of seconds, nor None")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the known name that it resembles, if any does."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def refuse(options: Mapping[str, object], where: str, known: Sequence[str]) -> None:
    """Raise :class:`TypeError` for keyword options that do not exist, with the ``known`` ones."""
    for name in options:
        raise TypeError(
            f"{where} has no option {name!r}; options: {', '.join(known)}{did_you_mean(name, known)}"
        )


_WHOLE = ("max_tokens", "min_tokens", "top_k", "seed", "logprobs")
_REAL = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_OPTIONAL = ("max_tokens", "seed", "logprobs")
_SEVERAL = ("stop", "stop_token_ids", "choices")


class Output:
    """How one output of a semantic function is decoded; docs/sampling.md defines each option.

    ``max_tokens`` None leaves the limit to the service; ``temperature`` 0 is greedy; ``stop`` (one string or
    several) and ``stop_token_ids`` end the output and are cut; ``logit_bias`` maps token ids to what is
    added to their logits; ``logprobs`` asks for log-probabilities, with so many alternatives each
    (:meth:`SemanticVariable.logprobs`).

    At most one of these constrains the text: ``schema`` (a pydantic model, a JSON schema, or a type such as
    ``list[int]``; ``.get()`` then gives a value of it), ``regex`` (the whole text matches), ``choices`` (the
    text is one of them).

    Raises :class:`TypeError` for a value of another type or an unknown option, and :class:`InvalidRequest`
    for a value out of range.
    """

    __slots__ = ("sampling", "typed")

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        schema: object = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        **unknown: object,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        refuse(unknown, "P.Output", list(options))
        _check_types(options)
        self.typed = None if schema is None else from_schema(schema)
        self.sampling = _sampling({**options, "schema": None}, self.typed)

    def typed_as(self, typed: Typed, where: str) -> Output:
        """The same with a type; raises :class:`InvalidRequest` if it has a constraint already."""
        if self.sampling.json_schema or self.sampling.regex or self.sampling.choices:
            raise InvalidRequest(
                f"{where}: the return annotation -> {typed.name} and an option of P.Output both constrain "
                "the output; leave one of them out",
                param="return",
            )
        output = Output()
        output.typed = typed
        output.sampling = _sampling(dict(self.sampling), typed)
        return output

    def __repr__(self) -> str:
        changed = self.sampling.model_dump(exclude_defaults=True, by_alias=True)
        return f"Output({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def _sampling(options: Mapping[str, Any], typed: Typed | None) -> SamplingBody:
    fields = {name: value for name, value in options.items() if value is not None}
    for name in _SEVERAL:
        if name in fields:
            fields[name] = (fields[name],) if isinstance(fields[name], str) else tuple(fields[name])
    if typed is not None:
        fields |= {"choices": typed.choices} if typed.choices else {"schema": typed.schema}
    try:
        return SamplingBody.model_validate(fields)
    except ValidationError as error:
        raise invalid("P.Output", error) from None


def _check_types(options: Mapping[str, object]) -> None:
    for name in (*_WHOLE, *_REAL):
        value = options[name]
        if value is None and name in _OPTIONAL:
            continue
        kind = numbers.Integral if name in _WHOLE else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            wanted = "a whole number" if name in _WHOLE else "a number"
            raise TypeError(
                f"P.Output: {name}={value!r} is not {wanted}{', nor None' if name in _OPTIONAL else ''}"
            )
    if not isinstance(options["ignore_eos"], bool):
        raise TypeError(f"P.Output: ignore_eos={options['ignore_eos']!r} is not True or False")
    if isinstance(options["choices"], str):
        raise TypeError(f"P.Output: choices={options['choices']!r} is one text; give a list of them")


def invalid(where: str, error: ValidationError) -> InvalidRequest:
    """A failed validation as :class:`InvalidRequest` that names the field and what was wrong with it."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return InvalidRequest(f"{where}: {field} = {_shown(first['input'])}: {first['msg']}", param=field)


def _shown(value: object) -> str:
    try:
        return f"{value!r:.200}"
    except ValueError:  # Python writes out no whole number of more than 4,300 digits
        return "a number of too many digits to show"


def check_text(text: str, where: str) -> str:
    """``text`` itself; :class:`InvalidRequest` for half of a surrogate pair, which UTF-8 cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{where}: character {error.start} is half of a surrogate pair, not text; read files and bytes "
            "with errors='replace'",
        ) from None
    return text
