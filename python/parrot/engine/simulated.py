"""An engine whose model is a cost model: steps take the time that it says, and the text is made up.

Everything else is the engine itself: context tree, admission, eviction, preemption, replies.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from .._core import ContextTree
from ..kernels.draws import Draws
from ..tokenizer.tokenizer import Tokenizer, read_json
from ..wire import CallId, CostModel, Dispatch, Fill, Ids, ModelInfo, Reply
from .batch import BLOCK_SIZE, StepLogits
from .call import EngineCall, Output
from .engine import Engine
from .made_up import MadeUpText
from .runner import I64, Reservation, Work

_MAX_STRETCH = 4096
_ANY_LENGTH = 2**20
_CLOSERS = ('"', "]", "}")  # where a grammar lets an output end, it should


def model_info(name: str, directory: Path, tokenizer: Tokenizer) -> ModelInfo:
    """What an engine that has only this model's tokenizer says of it."""
    longest = read_json(directory / "config.json", optional=True).get("max_position_embeddings")
    return ModelInfo(
        name=name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        max_model_len=longest if isinstance(longest, int) else _ANY_LENGTH,
        dtype="none",
        device="simulated",
    )


class SimulatedRunner:
    """Stands for a model of this cost. Its logits, which only some outputs need, are noise."""

    def __init__(self, cost: CostModel, tokenizer: Tokenizer, *, max_positions: int) -> None:
        self.cost = cost
        self.num_blocks = cost.num_blocks
        self.vocab_size = tokenizer.vocab_size
        self.num_shared_decodes = 0
        self.max_positions = max_positions
        self._tokenizer = tokenizer
        self._bias: Tensor | None = None

    def step_us(self, batch: int, prefill_tokens: int, kv_tokens: int) -> float:
        """What a step takes (:class:`~parrot.wire.CostModel`)."""
        return self.cost.step_us(batch, prefill_tokens, kv_tokens)

    def forward(
        self,
        tree: ContextTree,  # noqa: ARG002
        step: Reservation,
        wants_logits: Sequence[bool],
        more_rows: Sequence[int] = (),
        previous_ids: Tensor | None = None,  # noqa: ARG002
        draws: Draws | None = None,  # noqa: ARG002
    ) -> StepLogits:
        """See :class:`~parrot.engine.runner.Runner`."""
        rng = np.random.default_rng(zlib.crc32(step.token_ids.tobytes()))
        shape = (sum(wants_logits) + len(more_rows), self.vocab_size)
        return StepLogits(torch.from_numpy(rng.random(shape, dtype=np.float32)) + self._closers())

    def _closers(self) -> Tensor:
        if self._bias is None:
            self._bias = torch.zeros(self.vocab_size)
            ends = [self._tokenizer.backend.token_to_id(token) for token in _CLOSERS]
            self._bias[
                [*self._tokenizer.ends_below(self.vocab_size), *(end for end in ends if end is not None)]
            ] = 2.0
        return self._bias


def _alone(dispatch: Dispatch) -> Dispatch:
    """The call in a domain of its own."""
    verbs = tuple(
        msgspec.structs.replace(verb, public_len=0) if isinstance(verb, Fill) else verb
        for verb in dispatch.verbs
    )
    return msgspec.structs.replace(dispatch, domain=int(dispatch.call_id), verbs=verbs)


@dataclass(frozen=True, slots=True)
class Stretch:
    """The next ``num_steps`` steps of an engine to which nothing comes: each decodes one id of each call, and
    takes ``growth_us`` more than the one before, the first of them ``first_us``."""

    num_steps: int
    first_us: float
    growth_us: float

    def duration_us(self, num_steps: int) -> int:
        """What so many steps take."""
        return round(num_steps * self.first_us + self.growth_us * num_steps * (num_steps - 1) / 2)

    def steps_within(self, elapsed_us: int) -> int:
        """The first of the steps whose end is not before ``elapsed_us``; at most all of them."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            if self.duration_us(middle) < elapsed_us:
                low = middle + 1
            else:
                high = middle
        return low


class SimulatedEngine(Engine):
    """``wait_until`` gets the time of ``clock`` at which a step ends, and returns then.

    Without ``share_prefixes`` attention loads a shared token once for each sequence; without
    ``cache_prefixes`` no call finds what another one computed.
    """

    def __init__(
        self,
        runner: SimulatedRunner,
        tokenizer: Tokenizer,
        text: MadeUpText,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        clock: Callable[[], int],
        wait_until: Callable[[int], None],
        share_prefixes: bool = True,
        cache_prefixes: bool = True,
    ) -> None:
        super().__init__(
            runner,
            tokenizer,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            clock=clock,
            cost_model=runner.cost,
        )
        self.model = runner
        self._text = text
        self._wait_until = wait_until
        self._share_prefixes = share_prefixes
        self._cache_prefixes = cache_prefixes
        self._texts: dict[CallId, tuple[int, Ids]] = {}  # verb and ids of the running output
        self._step_started_us = 0
        self._step_us: int | None = None  # of a stretch that is taken as one step
        self._steady = False  # the last step was one of a stretch

    def submit(self, dispatch: Dispatch) -> None:
        """See :class:`Engine`."""
        self._steady = False
        if not self._cache_prefixes:
            dispatch = _alone(dispatch)
        super().submit(dispatch)

    def _forget(self, call: EngineCall) -> None:
        self._steady = False
        self._texts.pop(call.call_id, None)
        super()._forget(call)

    # --- steps ---

    def step(self) -> list[Reply]:
        """See :class:`Engine`."""
        self._step_started_us = self._clock()
        self._steady = bool(self._running)
        replies = super().step()
        self._steady = self._steady and not replies
        return replies

    def stretch(self) -> Stretch | None:
        """The steps ahead, if they can be told: more than one, all alike."""
        calls = self._running
        if not self._steady or not calls or len(self._early):
            return None
        available = self.tree.num_free_blocks + self.tree.num_evictable_blocks
        # Each call starts a block at most every BLOCK_SIZE steps, and may have to copy one.
        num_steps = min((available // len(calls) - 2) * BLOCK_SIZE, _MAX_STRETCH, *map(self._num_left, calls))
        if num_steps < 2:
            return None
        batch = len(calls)
        context_ids = np.array([call.context_id for call in calls], dtype=np.int64)
        first_us = self.model.step_us(batch, 0, self._kv_tokens(context_ids) + batch)
        return Stretch(num_steps, first_us, self.model.cost.per_kv_token_us * batch)

    def step_stretch(self, stretch: Stretch, num_steps: int) -> list[Reply]:
        """The first steps of a stretch, all at once; nothing may have happened since :meth:`stretch`."""
        if num_steps > 1:
            for call in self._running:
                if call.output is not None:
                    self._write(call, call.output, num_steps - 1)
        self._step_us = stretch.duration_us(num_steps)
        expected_us = self.counters.expected_us + self._step_us
        try:
            return self.step()
        finally:
            self._step_us = None
            self.counters.num_steps += num_steps - 1
            self.counters.expected_us = expected_us

    def _write(self, call: EngineCall, output: Output, count: int) -> None:
        """The output has so many ids more, which are not computed yet."""
        start = output.num_generated
        ids = self._ids_of(call, output)[start : start + count].tolist()
        output.num_generated += count
        call.ids.extend(ids)
        output.text.push_all(ids)

    def _num_left(self, call: EngineCall) -> int:
        """Steps that do no more than add an id to the call's output, the last of them perhaps its end."""
        output = call.output
        if output is None or not Work(call, call.num_remaining).is_decode or call.stream:
            return 0
        sampling = output.sampling
        if sampling.stop or sampling.stop_token_ids or _needs_logits(call, output):
            return 0
        return len(self._ids_of(call, output)) - output.num_generated

    def _admit(self) -> None:
        if self._step_us is None:  # within a stretch no call has left, so that none can enter
            super()._admit()

    def _choose(self) -> list[Work]:
        if self._step_us is None:
            return super()._choose()
        return [Work(call, call.num_remaining) for call in self._running]

    def _count(self, work: Work) -> None:
        if self._step_us is None:
            super()._count(work)
            self._steady = self._steady and work.is_decode
        else:
            self.counters.decode_tokens += work.count

    def _sample(
        self, work: Sequence[Work], outputs: Sequence[Output | None], reservation: Reservation
    ) -> list[int | None]:
        """See :class:`Engine`: the step takes its time, and the ids are made up."""
        took_us = self._step_us
        if took_us is None:
            prefill_tokens = sum(w.count for w in work if not w.is_decode)
            kv_tokens = self._kv_tokens(reservation.context_ids)
            took_us = round(self.model.step_us(len(work), prefill_tokens, kv_tokens))
        self._wait_until(self._step_started_us + took_us)
        sampling = [(w.call, output) for w, output in zip(work, outputs, strict=True) if output is not None]
        sampled: list[int | None] = [None] * len(sampling)
        needs_logits = any(_needs_logits(call, output) for call, output in sampling)
        if needs_logits or any(w.call.prompt_log is not None for w in work):
            sampled = super()._sample(work, outputs, reservation)
        return [
            token_id if _needs_logits(call, output) else int(self._ids_of(call, output)[output.num_generated])
            for token_id, (call, output) in zip(sampled, sampling, strict=True)
        ]

    # --- the model ---

    def _kv_tokens(self, context_ids: I64) -> int:
        """KV tokens that a step of these contexts loads."""
        if self._share_prefixes:
            return self.tree.num_distinct_tokens(context_ids)
        lengths = np.empty(len(context_ids), dtype=np.int32)
        self.tree.lengths(context_ids, lengths)
        return int(lengths.sum())

    def _ids_of(self, call: EngineCall, output: Output) -> Ids:
        verb, ids = self._texts.get(call.call_id, (-1, None))
        if ids is None or verb != output.verb:
            ids = self._text.output(call.ids.view(0, output.start), output.sampling)
            self._texts[call.call_id] = (output.verb, ids)
        return ids


def _needs_logits(call: EngineCall, output: Output) -> bool:
    return output.matcher is not None or output.state.log is not None or call.prompt_log is not None
