"""What a caller may ask: the objective of a get, and how an output is decoded."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from pydantic import ValidationError

from ..api import SamplingBody
from ..errors import InvalidRequest, UnsupportedParameter

_NOT_YET = frozenset(
    {
        "choices",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "min_p",
        "penalties",
        "presence_penalty",
        "regex",
        "repetition_penalty",
        "schema",
        "top_k",
        "top_logprobs",
    }
)


class Perf(StrEnum):
    """The objective that a ``get`` gives to its variable and to what the variable depends on."""

    LATENCY = "LATENCY"
    THROUGHPUT = "THROUGHPUT"


LATENCY = Perf.LATENCY
THROUGHPUT = Perf.THROUGHPUT


def to_perf(perf: Perf | str) -> Perf:
    """The objective named by ``perf``; raises :class:`UnsupportedParameter` for any other word."""
    try:
        return Perf(perf)
    except ValueError:
        raise UnsupportedParameter(
            f"perf={perf!r} is not supported; use P.LATENCY or P.THROUGHPUT", param="perf"
        ) from None


def check_timeout(timeout: float | None) -> None:
    """Raise :class:`TypeError` for a timeout that is neither None nor a number of seconds."""
    if timeout is not None and (not isinstance(timeout, (int, float)) or math.isnan(timeout)):
        raise TypeError(f"timeout={timeout!r} is not a number of seconds, nor None")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the known name that it resembles, if any does."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def refuse(options: Mapping[str, object], where: str, known: Sequence[str]) -> None:
    """Raise for keyword options that this version does not implement (:class:`UnsupportedParameter`) or that
    do not exist (:class:`TypeError`, with the ``known`` ones)."""
    for name in options:
        if name in _NOT_YET:
            raise UnsupportedParameter(f"{where}: {name}= is not supported by this version", param=name)
        raise TypeError(
            f"{where} has no option {name!r}; options: {', '.join(known)}{did_you_mean(name, known)}"
        )


class Output:
    """How one output of a semantic function is decoded.

    ``max_tokens`` None leaves the limit to the service; ``temperature`` 0 is greedy; decoding ends before
    the first of the ``stop`` strings. Raises :class:`TypeError` for a value of another type,
    :class:`InvalidRequest` for one out of range and :class:`UnsupportedParameter` for an option of a later
    version.
    """

    __slots__ = ("sampling",)

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        **unsupported: object,
    ) -> None:
        refuse(unsupported, "P.Output", list(SamplingBody.model_fields))
        _check_types(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        if not isinstance(ignore_eos, bool):
            raise TypeError(f"P.Output: ignore_eos={ignore_eos!r} is not True or False")
        try:
            self.sampling = SamplingBody(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
                ignore_eos=ignore_eos,
            )
        except ValidationError as error:
            raise invalid("P.Output", error) from None

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.sampling if value not in (None, ()))
        return f"Output({shown})"


def _check_types(**options: object) -> None:
    for name, value in options.items():
        is_whole = name in ("max_tokens", "seed")
        if value is None and is_whole:
            continue
        kind = numbers.Integral if is_whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            wanted = "a whole number, nor None" if is_whole else "a number"
            raise TypeError(f"P.Output: {name}={value!r} is not {wanted}")


def invalid(where: str, error: ValidationError) -> InvalidRequest:
    """A failed validation as :class:`InvalidRequest` that names the field and what was wrong with it."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return InvalidRequest(f"{where}: {field} = {first['input']!r:.200}: {first['msg']}", param=field)


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
