"""One call inside an engine: its program of verbs, the ids of its context, and how far they are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import EngineError, InvalidRequest
from ..wire import (
    PUBLIC_DOMAIN,
    ContextId,
    Dispatch,
    Fill,
    FillDone,
    FinishReason,
    Generate,
    GenerateDone,
    Grammar,
    Ids,
    Logprobs,
    Sampling,
    Timing,
    WireError,
    pack_ids,
    unpack_ids,
)
from .detokenizer import Decode, OutputText
from .grammar import Matcher
from .id_buffer import IdBuffer
from .logprobs import PromptLog
from .sampling import OutputState, check_sampling

Encode = Callable[[str], Ids]
_NUMBER_LIMIT = 2**63  # of contexts and domains: the context tree has int64
_CONTEXT_IDS = 8  # ids before an output that its decoder may look at
_DECODED_TOGETHER = 32  # ids of a text that is wanted at its end only


@dataclass(slots=True)
class FillSpan:
    """The half-open range of ids that one Fill brought and that is not computed yet."""

    verb: int
    start: int
    end: int
    cached: int = 0  # tokens of it that were in the cache when the call was first admitted


class Output:
    """One Generate while it runs. Its ids are those of the context from ``start`` on."""

    def __init__(
        self,
        verb: int,
        sampling: Sampling,
        context: Ids,
        decode: Decode,
        eos_ids: frozenset[int],
        *,
        stream: bool,
    ) -> None:
        """``context`` are the ids before the output."""
        self.verb = verb
        self.sampling = sampling
        self.start = len(context)
        self.num_generated = 0
        self.first_token_us = 0
        self.matcher: Matcher | None = None
        end_ids = frozenset(sampling.stop_token_ids)
        self.end_ids = end_ids if sampling.ignore_eos else end_ids | eos_ids
        is_read_early = stream or bool(sampling.stop) or sampling.logprobs is not None
        self.text = OutputText(
            decode,
            sampling.stop,
            context[-_CONTEXT_IDS:].tolist(),
            num_unstoppable=sampling.min_tokens,
            together=1 if is_read_early else _DECODED_TOGETHER,
        )
        self.state = OutputState(
            sampling, self.start, context, self.end_ids, constrained=sampling.grammar is not None
        )
        self._num_logged = 0  # logprobs that take_logprobs() has given
        looks_back = sampling.grammar is not None or self.state.is_penalised or self.state.log is not None
        # Nothing of the next id's sampling needs this one on the host, and its text cannot end it.
        self.may_be_late = not (looks_back or sampling.stop or sampling.min_tokens)

    def take_logprobs(self) -> Logprobs | None:
        """Log-probabilities, if asked for, of the ids that are whole in the final text and were not taken
        before."""
        if self.state.log is None:
            return None
        start, self._num_logged = self._num_logged, self.text.num_final
        return self.state.log.pack(start, self._num_logged)


class EngineCall:
    """A dispatched call. ``ids`` are all ids of its context that are known; the first ``num_computed`` have
    their KV.

    While it runs, either ids remain to be computed or :attr:`ended` is true. The program advances from one
    Generate to the next; the Fills between them append to ``ids``. Raises :class:`InvalidRequest` for a
    program that cannot be run.
    """

    def __init__(self, dispatch: Dispatch, received_us: int) -> None:
        self.call_id = dispatch.call_id
        _check_early_fill(dispatch)
        self.context_id = _context_of(dispatch)
        self.domain = _domain_of(dispatch)
        self.public_len = _public_len_of(dispatch)
        self.order = (dispatch.app_arrival_us, int(dispatch.call_id))  # earlier applications first
        self.stream = dispatch.stream
        self.received_us = received_us
        self.admitted_us = 0  # 0: never admitted
        self.has_context = False  # the tree knows context_id
        self.frees_context = False
        self.num_computed = 0
        self.pending_row: int | None = None  # the next id is on the device: row of the step that runs
        self.fills: deque[FillSpan] = deque()
        self.output: Output | None = None
        self._verbs = dispatch.verbs
        self._cursor = 0
        self._fill_ids = {i: _fill_ids(v) for i, v in enumerate(self._verbs) if isinstance(v, Fill)}
        self._samplings = {i: v.sampling for i, v in enumerate(self._verbs) if isinstance(v, Generate)}
        self.matchers: dict[int, Matcher] = {}  # of constrained outputs, by verb; there before advance()
        self.prompt_log = self._prompt_log()
        self.num_fill_ids = sum(map(len, self._fill_ids.values()))
        self.max_generated = sum(sampling.max_tokens for sampling in self._samplings.values())
        self.ids = IdBuffer(self.num_fill_ids + min(self.max_generated, 4096))

    def check_not_empty(self) -> None:
        """Raise :class:`EngineError` if it would generate onto an empty context."""
        if self.output is not None and len(self.ids) == 0:
            raise EngineError(f"call {self.call_id} would generate onto an empty context; fill it first")

    def __str__(self) -> str:
        """For logs."""
        return f"{self.call_id} ({self.num_computed} of {len(self.ids)} tokens)"

    @property
    def num_remaining(self) -> int:
        """Ids that wait to be computed, the one that only the device knows included."""
        return self.ids.length + (self.pending_row is not None) - self.num_computed

    @property
    def num_ids(self) -> int:
        """Ids of its context, the one that only the device knows included."""
        return self.ids.length + (self.pending_row is not None)

    @property
    def num_computable(self) -> int:
        """How many of them one step may compute: those of one domain."""
        to_seam = self.public_len - self.num_computed
        return min(self.num_remaining, to_seam) if to_seam > 0 else self.num_remaining

    @property
    def ended(self) -> bool:
        """Every verb has been replied to. A last generated id may never be computed."""
        return self._cursor == len(self._verbs) and self.output is None and not self.fills

    def _prompt_log(self) -> PromptLog | None:
        for verb, sampling in self._samplings.items():
            if sampling.prompt_logprobs is not None:
                if verb != min(self._samplings):
                    raise InvalidRequest(
                        f"call {self.call_id}: prompt_logprobs belongs to its first Generate",
                        param="prompt_logprobs",
                    )
                prompt_len = sum(len(ids) for fill, ids in self._fill_ids.items() if fill < verb)
                return PromptLog(sampling.prompt_logprobs, prompt_len)
        return None

    @property
    def max_cached(self) -> int:
        """How many of its ids may come from the cache when it is admitted."""
        longest = max(0, len(self.ids) - 1)
        return longest if self.prompt_log is None else min(longest, len(self.prompt_log.log))

    @property
    def grammars(self) -> dict[int, Grammar]:
        """What the texts of constrained outputs must be, by verb."""
        return {verb: s.grammar for verb, s in self._samplings.items() if s.grammar is not None}

    def logprobs_of(self, verb: int) -> int | None:
        """How many alternatives per id that Generate asked for; None: no log-probabilities."""
        return self._samplings[verb].logprobs

    def check(self, vocab_size: int) -> None:
        """Raise :class:`InvalidRequest` for an id outside the vocabulary or a bad sampling parameter."""
        for sampling in self._samplings.values():
            check_sampling(sampling, vocab_size)
        for verb, ids in self._fill_ids.items():
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            if len(outside):
                raise InvalidRequest(
                    f"call {self.call_id}, verb {verb}: token id {outside[0]} is outside [0, {vocab_size})",
                    param="token_ids",
                )

    def advance(self, decode: Decode, eos_ids: frozenset[int] = frozenset()) -> list[ContextId]:
        """Enter the verbs up to the next Generate or the end. Returns other contexts to be freed.

        Ids with which a grammar must begin become part of the context at once. A Generate needs the logits
        of the last id: where that is computed already, ``num_computed`` goes back by one.
        """
        freed: list[ContextId] = []
        while self.output is None and self._cursor < len(self._verbs):
            verb = self._verbs[self._cursor]
            if isinstance(verb, Fill):
                start = len(self.ids)
                self.ids.extend(self._fill_ids.pop(self._cursor))
                self.fills.append(FillSpan(self._cursor, start, len(self.ids)))
            elif isinstance(verb, Generate):
                self.output = Output(
                    self._cursor, verb.sampling, self.ids.view(), decode, eos_ids, stream=self.stream
                )
                self._begin(self.output)
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

    def _begin(self, output: Output) -> None:
        output.matcher = self.matchers.pop(output.verb, None)
        if output.matcher is not None and len(self.ids):
            self._append_forced(output, output.matcher.begin(output.sampling.max_tokens))

    def _append_forced(self, output: Output, ids: Sequence[int]) -> None:
        for token_id in ids:
            self._append(output, token_id)
        output.state.add_forced(ids)

    def _append(self, output: Output, token_id: int) -> None:
        output.num_generated += 1
        self.ids.append(token_id)
        output.text.push(token_id)

    def accept(self, output: Output, token_id: int, now_us: int) -> tuple[str, FinishReason | None]:
        """Take a sampled id, and those that a grammar lets follow without a choice, into the running
        Generate: the text that became final, if it is streamed, and why it ends if it does. An id that ends
        it is not kept.

        Raises :class:`InvalidRequest` if the grammar turns out to be too complex to follow."""
        output.first_token_us = output.first_token_us or now_us
        reason: FinishReason | None = None
        if token_id in output.end_ids:
            output.num_generated += 1
            if output.matcher is not None:
                output.matcher.check()
            reason = "stop"
        else:
            self._append(output, token_id)
            is_complete = output.matcher is not None and self._follow(output, output.matcher, token_id)
            if is_complete or output.text.stopped:
                reason = "stop"
            elif output.num_generated >= output.sampling.max_tokens:
                reason = "length"
        if reason is not None and not output.text.stopped:
            output.text.finish()
            reason = "stop" if output.text.stopped else reason
        return output.text.take() if self.stream else "", reason

    def _follow(self, output: Output, matcher: Matcher, token_id: int) -> bool:
        """Append the ids that a grammar lets follow without a choice; whether the text is complete then."""
        forced = matcher.accept(token_id)
        room = output.sampling.max_tokens - output.num_generated
        self._append_forced(output, forced[:room])
        return matcher.finished and len(forced) <= room

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
            logprobs=None if output.state.log is None else output.state.log.pack(0, output.text.num_final),
            prompt_logprobs=self._take_prompt_logprobs(),
        )

    def _take_prompt_logprobs(self) -> Logprobs | None:
        taken, self.prompt_log = self.prompt_log, None
        return None if taken is None else taken.pack()


def _check_early_fill(dispatch: Dispatch) -> None:
    """It is cache once it is computed: nothing may come after, and nothing cannot be computed."""
    first, *more = dispatch.verbs or (None,)
    if dispatch.early_fill and (more or not isinstance(first, Fill) or not first.token_ids):
        raise InvalidRequest(
            f"call {dispatch.call_id}: an early fill is one Fill of at least one id", param="verbs"
        )


def _context_of(dispatch: Dispatch) -> ContextId:
    contexts = {verb.context_id for verb in dispatch.verbs if isinstance(verb, Fill | Generate)}
    if len(contexts) != 1 or not 0 < min(contexts) < _NUMBER_LIMIT:
        raise InvalidRequest(
            f"call {dispatch.call_id} fills and generates in the contexts {sorted(contexts)}, expected one",
            param="verbs",
        )
    return contexts.pop()


def _domain_of(dispatch: Dispatch) -> int:
    if not PUBLIC_DOMAIN < dispatch.domain < _NUMBER_LIMIT:
        raise InvalidRequest(
            f"call {dispatch.call_id} is of the domain {dispatch.domain}; tenants have numbers from 1 on",
            param="domain",
        )
    return dispatch.domain


def _public_len_of(dispatch: Dispatch) -> int:
    public_lens = [verb.public_len for verb in dispatch.verbs if isinstance(verb, Fill)]
    first = dispatch.verbs[0]
    longest = len(_fill_ids(first)) if isinstance(first, Fill) else 0
    if any(public_lens[1:]) or not 0 <= sum(public_lens) <= longest:
        raise InvalidRequest(
            f"call {dispatch.call_id}: public_len of its Fills is {public_lens}; only text that the context "
            f"begins with, here {longest} ids, can be public",
            param="public_len",
        )
    return sum(public_lens)


def _fill_ids(fill: Fill) -> Ids:
    try:
        return unpack_ids(fill.token_ids)
    except WireError as error:
        raise InvalidRequest(error.message, param="token_ids") from None


def engine_error(error: Exception) -> EngineError:
    """What a call ends with when the engine failed under it."""
    return EngineError(f"the engine failed while it ran the call: {type(error).__name__}: {error}")
