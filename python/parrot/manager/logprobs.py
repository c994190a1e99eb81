"""Log-probabilities from the wire's arrays to the words of the two APIs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import wire
from ..api import IdLogprob, TokenLogprobs
from ..tokenizer import TokenBytes


@dataclass(frozen=True, slots=True)
class Likelihood:
    """An id with its bytes and its log-probability."""

    token_id: int
    token: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The bytes as text; what is no whole character is replaced."""
        return self.token.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class GeneratedId(Likelihood):
    """A generated id, and the likeliest ids in its place, likeliest first."""

    top: tuple[Likelihood, ...]


def num_ids(logprobs: wire.Logprobs | None) -> int:
    """How many generated ids it is about."""
    return 0 if logprobs is None else len(logprobs.token_ids) // 4


def skip(logprobs: wire.Logprobs, count: int) -> wire.Logprobs:
    """The same without its first ``count`` ids."""
    top = 4 * count * logprobs.num_top
    return wire.Logprobs(
        logprobs.num_top,
        logprobs.token_ids[4 * count :],
        logprobs.values[4 * count :],
        logprobs.top_ids[top:],
        logprobs.top_values[top:],
    )


def read_logprobs(logprobs: wire.Logprobs, token_bytes: TokenBytes) -> list[GeneratedId]:
    """One entry per generated id."""
    ids = wire.unpack_ids(logprobs.token_ids).tolist()
    values = np.frombuffer(logprobs.values, dtype="<f4").tolist()
    shape = (len(ids), logprobs.num_top)
    top_ids = wire.unpack_ids(logprobs.top_ids).reshape(shape).tolist()
    top_values = np.frombuffer(logprobs.top_values, dtype="<f4").reshape(shape).tolist()
    return [
        GeneratedId(
            token_id,
            token_bytes[token_id],
            value,
            tuple(
                Likelihood(other, token_bytes[other], its_value)
                for other, its_value in zip(others, their_values, strict=True)
            ),
        )
        for token_id, value, others, their_values in zip(ids, values, top_ids, top_values, strict=True)
    ]


def to_body(entries: list[GeneratedId]) -> tuple[TokenLogprobs, ...]:
    """As ``/v1/get`` words it."""
    return tuple(
        TokenLogprobs(
            token_id=entry.token_id,
            text=entry.text,
            logprob=entry.logprob,
            top=tuple(IdLogprob(token_id=o.token_id, text=o.text, logprob=o.logprob) for o in entry.top),
        )
        for entry in entries
    )
