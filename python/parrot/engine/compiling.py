"""Calls that wait for the grammars of their outputs."""

from __future__ import annotations

from concurrent.futures import Future, wait

from llguidance import LLMatcher

from ..errors import ParrotError
from .call import EngineCall
from .grammar import Grammars, Matcher

_WAIT_S = 0.005  # an idle engine's loop looks for messages this often while something is compiled


class CompileQueue:
    """Gives calls their matchers once these exist."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._calls: list[tuple[EngineCall, dict[int, Future[LLMatcher]]]] = []

    def add(self, call: EngineCall) -> bool:
        """Take a new call; False if it can run now. Raises :class:`InvalidRequest` for a grammar that is
        known to be impossible."""
        futures = {
            verb: self._grammars.compile(grammar, call.domain) for verb, grammar in call.grammars.items()
        }
        if all(future.done() for future in futures.values()):
            _give_matchers(call, futures)
            return False
        self._calls.append((call, futures))
        return True

    def wait(self) -> None:
        """Wait a little for the first that compiles."""
        if self._calls:
            wait([future for _, futures in self._calls for future in futures.values()], timeout=_WAIT_S)

    def take_done(self) -> list[tuple[EngineCall, ParrotError | None]]:
        """Calls that have their matchers now, or the error of one that cannot be made."""
        done: list[tuple[EngineCall, ParrotError | None]] = []
        for entry in self._calls:
            call, futures = entry
            if all(future.done() for future in futures.values()):
                try:
                    _give_matchers(call, futures)
                    done.append((call, None))
                except ParrotError as error:
                    done.append((call, error))
        taken = {call.call_id for call, _ in done}
        self._calls = [(call, futures) for call, futures in self._calls if call.call_id not in taken]
        return done


def _give_matchers(call: EngineCall, futures: dict[int, Future[LLMatcher]]) -> None:
    for verb, future in futures.items():
        grammar = call.grammars[verb]
        native = future.result().deep_copy()
        # Log-probabilities of ids that are filled in would need logits that are not computed.
        call.matchers[verb] = Matcher(native, grammar, fast_forward=call.logprobs_of(verb) is None)
