"""``echo`` of ``/v1/completions``: the prompt before the answer, with its log-probabilities if asked for."""

from __future__ import annotations

from dataclasses import dataclass

from .. import wire
from ..tokenizer import Piece
from .logprobs import read_logprobs
from .openai_wording import Answer
from .service import Service
from .single import SingleCall


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt of a request, as text or as ids. ``alone``: nothing is to follow it (``max_tokens`` 0)."""

    prompt: list[Piece] | list[int]
    alone: bool

    def before(self, answer: Answer, service: Service, scored: SingleCall, ids: wire.Ids) -> Answer:
        """The answer with the prompt before it. ``ids`` are those of the prompt, ``scored`` is the call that
        has their log-probabilities."""
        text = self._text(service)
        if self.alone:
            answer = Answer("", "length", None if answer.logprobs is None else [])
        if answer.logprobs is None or scored.prompt_logprobs is None:
            return Answer(text + answer.text, answer.reason, answer.logprobs)
        entries = read_logprobs(scored.prompt_logprobs, service.token_bytes)
        first = service.token_bytes[int(ids[0])].decode("utf-8", "replace")
        return Answer(text + answer.text, answer.reason, [*entries, *answer.logprobs], first)

    def _text(self, service: Service) -> str:
        pieces = [piece.text for piece in self.prompt if isinstance(piece, Piece)]
        if pieces or not self.prompt:
            return "".join(pieces)
        joined = b"".join(service.token_bytes[token] for token in self.prompt if isinstance(token, int))
        return joined.decode("utf-8", "replace")
