"""One call inside an engine: its program of verbs, the ids of its context, and how far they are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidRequest
from ..wire import (
    ContextId,
    Dispatch,
    Fill,
    FillDone,
    FinishReason,
    Generate,
    GenerateDone,
    Ids,
    Sampling,
    Timing,
    WireError,
    pack_ids,
    unpack_ids,
)
from .detokenizer import Decode, OutputText
from .sampling import Draw, check_sampling, choose_seed

Encode = Callable[[str], Ids]
_CONTEXT_IDS = 8  # ids before an output that its decoder may look at


class IdBuffer:
    """A growing int32 array."""

    def __init__(self, capacity: int) -> None:
        self._data = np.empty(max(capacity, 16), dtype=np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def view(self, start: int = 0, end: int | None = None) -> Ids:
        """``ids[start:end]`` without a copy, valid until the next change."""
        return self._data[start : self._length if end is None else min(end, self._length)]

    def extend(self, ids: Ids | Sequence[int]) -> None:
        """Append ids."""
        end = self._length + len(ids)
        if end > len(self._data):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[: self._length] = self.view()
            self._data = grown
        self._data[self._length : end] = ids
        self._length = end

    def truncate(self, length: int) -> None:
        """Drop the ids from ``length`` on."""
        self._length = min(self._length, length)


@dataclass(slots=True)
class FillSpan:
    """The half-open range of ids that one Fill brought and that is not computed yet."""

    verb: int
    start: int
    end: int
    cached: int = 0  # tokens of it that were in the cache when the call was first admitted


class Output:
    """One Generate while it runs. Its ids are those of the context from ``start`` on."""

    def __init__(self, verb: int, sampling: Sampling, start: int, text: OutputText) -> None:
        self.verb = verb
        self.sampling = sampling
        self.start = start
        self.text = text
        self.num_generated = 0
        self.first_token_us = 0
        self._seed = choose_seed(sampling)

    def draw(self, position: int) -> Draw:
        """How the id at ``position`` of the context is to be sampled."""
        return Draw(self.sampling.temperature, self.sampling.top_p, self._seed, position)


class EngineCall:
    """A dispatched call. ``ids`` are all ids of its context; the first ``num_computed`` have their KV.

    While it runs, either ids remain to be computed or :attr:`ended` is true. The program advances from one
    Generate to the next; the Fills between them append to ``ids``. Raises :class:`InvalidRequest` for a
    program that cannot be run.
    """

    def __init__(self, dispatch: Dispatch, received_us: int) -> None:
        self.call_id = dispatch.call_id
        self.context_id = _context_of(dispatch)
        self.domain = dispatch.domain
        self.order = (dispatch.app_arrival_us, int(dispatch.call_id))  # earlier applications first
        self.stream = dispatch.stream
        self.received_us = received_us
        self.admitted_us = 0  # 0: never admitted
        self.has_context = False  # the tree knows context_id
        self.frees_context = False
        self.num_computed = 0
        self.fills: deque[FillSpan] = deque()
        self.output: Output | None = None
        self._verbs = dispatch.verbs
        self._cursor = 0
        self._fill_ids = {i: _fill_ids(v) for i, v in enumerate(self._verbs) if isinstance(v, Fill)}
        samplings = [v.sampling for v in self._verbs if isinstance(v, Generate)]
        for sampling in samplings:
            check_sampling(sampling)
        self.num_fill_ids = sum(map(len, self._fill_ids.values()))
        self.max_generated = sum(sampling.max_tokens for sampling in samplings)
        self.ids = IdBuffer(self.num_fill_ids + min(self.max_generated, 4096))

    @property
    def num_remaining(self) -> int:
        """Ids that wait to be computed."""
        return len(self.ids) - self.num_computed

    @property
    def ended(self) -> bool:
        """Every verb has been replied to. A last generated id may never be computed."""
        return self._cursor == len(self._verbs) and self.output is None and not self.fills

    def check_ids(self, vocab_size: int) -> None:
        """Raise :class:`InvalidRequest` for an id outside the vocabulary."""
        for verb, ids in self._fill_ids.items():
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            if len(outside):
                raise InvalidRequest(
                    f"call {self.call_id}, verb {verb}: token id {outside[0]} is outside [0, {vocab_size})",
                    param="token_ids",
                )

    def advance(self, decode: Decode) -> list[ContextId]:
        """Enter the verbs up to the next Generate or the end. Returns other contexts to be freed.

        A Generate needs the logits of the last id: where that is computed already, ``num_computed`` goes back
        by one.
        """
        freed: list[ContextId] = []
        while self.output is None and self._cursor < len(self._verbs):
            verb = self._verbs[self._cursor]
            if isinstance(verb, Fill):
                start = len(self.ids)
                self.ids.extend(self._fill_ids.pop(self._cursor))
                self.fills.append(FillSpan(self._cursor, start, len(self.ids)))
            elif isinstance(verb, Generate):
                context = self.ids.view(max(0, len(self.ids) - _CONTEXT_IDS)).tolist()
                text = OutputText(decode, verb.sampling.stop, context)
                self.output = Output(self._cursor, verb.sampling, len(self.ids), text)
            elif verb.context_id == self.context_id:
                self.frees_context = True
            else:
                freed.append(verb.context_id)
            self._cursor += 1
        if self.output is not None and self.num_computed > 0:
            self.num_computed = min(self.num_computed, len(self.ids) - 1)
        return freed

    def admitted(self, prefix_len: int, now_us: int) -> None:
        """The context is open on ``prefix_len`` cached tokens."""
        self.num_computed = prefix_len
        if self.admitted_us == 0:
            self.admitted_us = now_us
            for fill in self.fills:
                fill.cached = max(0, min(prefix_len, fill.end) - fill.start)

    def take_filled(self) -> list[FillDone]:
        """Replies for the Fills that are computed by now."""
        done: list[FillDone] = []
        while self.fills and self.fills[0].end <= self.num_computed:
            fill = self.fills.popleft()
            done.append(FillDone(self.call_id, fill.verb, fill.end - fill.start, fill.cached))
        return done

    def accept(
        self, output: Output, token_id: int, eos_ids: frozenset[int], now_us: int
    ) -> tuple[str, FinishReason | None]:
        """Take a sampled id into the running Generate: the text that became final, and why it ends if it
        does. An end-of-sequence id is not kept."""
        output.num_generated += 1
        output.first_token_us = output.first_token_us or now_us
        if token_id in eos_ids and not output.sampling.ignore_eos:
            return output.text.finish(), "stop"
        self.ids.extend((token_id,))
        text = output.text.push(token_id)
        if output.text.stopped:
            return text, "stop"
        if output.num_generated < output.sampling.max_tokens:
            return text, None
        text += output.text.finish()
        return text, "stop" if output.text.stopped else "length"

    def finish_output(
        self, output: Output, reason: FinishReason, encode: Encode, now_us: int
    ) -> GenerateDone:
        """End the running Generate. After a stop string ``ids``, and so ``num_computed``, are cut.

        Kept text that begins inside the cut id is encoded anew, so that the ids spell exactly the text.
        """
        self.output = None
        if output.text.stopped:
            num_whole, rest = output.text.cut()
            self.ids.truncate(output.start + num_whole)
            self.num_computed = min(self.num_computed, len(self.ids))
            self.ids.extend(encode(rest) if rest else ())
        return GenerateDone(
            call_id=self.call_id,
            verb=output.verb,
            text=output.text.text,
            token_ids=pack_ids(self.ids.view(output.start)),
            num_generated=output.num_generated,
            finish_reason=reason,
            timing=Timing(self.received_us, self.admitted_us, output.first_token_us, now_us),
        )


def _context_of(dispatch: Dispatch) -> ContextId:
    contexts = {verb.context_id for verb in dispatch.verbs if isinstance(verb, Fill | Generate)}
    if len(contexts) != 1 or min(contexts) <= 0:
        raise InvalidRequest(
            f"call {dispatch.call_id} fills and generates in the contexts {sorted(contexts)}, expected one",
            param="verbs",
        )
    return contexts.pop()


def _fill_ids(fill: Fill) -> Ids:
    try:
        return unpack_ids(fill.token_ids)
    except WireError as error:
        raise InvalidRequest(error.message, param="token_ids") from None
