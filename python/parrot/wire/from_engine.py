"""Messages from an engine to the manager."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from ..errors import ErrorInfo
from .common import CallId, ContextId, FinishReason

# What an engine says is checked while it is decoded: a value outside these limits makes the frame no message.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # exact as a float, and far from the end of an int64
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Capacity = Annotated[int, msgspec.Meta(ge=1, le=2**40)]  # as the scheduler takes it
_Cost = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # us; NaN is outside of every limit
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_EngineName = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{1,128}\Z")]  # it stands in lines of the log
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Call = Annotated[CallId, msgspec.Meta(ge=0, le=2**53)]
_Context = Annotated[ContextId, msgspec.Meta(ge=0, le=2**53)]


_LEAST_SHOWN_MS = 1e-4


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class StepCost(msgspec.Struct, frozen=True):
    """step_us = base_us + per_sequence_us * batch + per_prefill_token_us * prefill tokens
    + per_kv_token_us * KV tokens loaded (a shared prefix counted once)."""

    base_us: _Cost
    per_sequence_us: _Cost
    per_prefill_token_us: _Cost
    per_kv_token_us: _Cost

    def __str__(self) -> str:
        """For logs: milliseconds, without what costs next to nothing."""
        parts = (
            (self.base_us / 1e3, ""),
            (self.per_sequence_us / 1e3, " a sequence"),
            (self.per_prefill_token_us / 1e3, " a prefill token"),
            (self.per_kv_token_us, " for 1,000 KV tokens"),
        )
        shown = [f"{_three_digits(ms)} ms{of}" for ms, of in parts if ms >= _LEAST_SHOWN_MS]
        return " + ".join(shown) or "next to nothing"

    def prompt_token_us(self, max_batch_tokens: int) -> float:
        """What a token of a long prompt takes, of which a step computes ``max_batch_tokens`` at the most (0:
        as many as there are): its share of the step besides its own."""
        share_us = self.base_us / max_batch_tokens if max_batch_tokens > 0 else 0.0
        return self.per_prefill_token_us + share_us

    def step_us(self, batch: float, prefill_tokens: float, kv_tokens: float) -> float:
        """What a step takes."""
        fixed_us = self.base_us + self.per_sequence_us * batch
        return fixed_us + self.per_prefill_token_us * prefill_tokens + self.per_kv_token_us * kv_tokens


class CostModel(StepCost, frozen=True):
    """What steps take, measured by the engine at its start, and ``capacity_tokens``, what its KV cache holds;
    read by the scheduler."""

    capacity_tokens: _Capacity
    num_blocks: _Size

    def tokens_within(self, target_us: float, length: int) -> int:
        """Most KV tokens, in sequences of ``length`` that share nothing, beside which a decode step takes no
        longer than ``target_us``."""
        per_sequence_us = self.per_sequence_us + self.per_kv_token_us * length
        room_us = target_us - self.base_us
        if room_us <= 0:
            return 0
        batch = room_us / per_sequence_us if per_sequence_us > 0 else math.inf  # also if it is almost nothing
        return min(int(min(batch, self.capacity_tokens)) * length, self.capacity_tokens)


class ModelInfo(msgspec.Struct, frozen=True):
    """What an engine serves. ``fingerprint`` is the hash of the model's files that decide token ids."""

    name: _Name
    fingerprint: _Text
    vocab_size: _Size
    max_model_len: _Size
    dtype: _Text
    device: _Text


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the engine started, and its present load; ``clock_us`` is the engine's clock now."""

    clock_us: _Count
    busy_us: _Count  # time spent inside steps that had work
    num_steps: _Count
    num_running: _Count
    num_waiting: _Count
    num_free_blocks: _Count
    num_evictable_blocks: _Count
    num_held_blocks: _Count
    prefill_tokens: _Count  # computed
    decode_tokens: _Count
    cached_tokens: _Count  # prompt tokens whose KV was found in the cache
    forks: _Count  # contexts that started from a cached prefix
    cow_copies: _Count  # partial blocks copied on first write
    evicted_blocks: _Count
    hinted_contexts: _Count  # how often a context's future was made known (ContextUses)
    preemptions: _Count
    dropped_messages: _Count
    early_fills: _Count  # prefixes that were computed ahead of their calls to the end
    early_fill_tokens: _Count  # of prefill_tokens, those computed for early fills
    shared_decodes: _Count  # of decode_tokens, those whose attention read a prefix once for several calls
    expected_us: _Count = 0  # what the cost model, as of each step, says of the steps in busy_us
    calls_ended: _Count = 0
    turn_us: _Count = 0  # how long the loop's present turn has lasted; 0: it waits for work
    pool_breaches: _Count = 0  # how often the KV cache broke its invariant and was made anew


class Register(msgspec.Struct, frozen=True, tag=True):
    """First message of an engine, repeated until a Ping arrives and whenever ``manager_id`` changes.
    ``epoch`` differs at every start of the engine: a new one under an old name means the old one died.
    ``max_batch_tokens``: of a step, prefill and decode together; 0: not said."""

    protocol_version: _Count
    name: _EngineName
    epoch: _Name
    pid: _Count
    model: ModelInfo
    cost_model: CostModel
    max_batch_size: _Size
    sequence: _Count = 0  # of the last StepReplies before it
    max_batch_tokens: _Count = 0


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every heartbeat, also while a long step runs. ``sequence``: of the last StepReplies before it.
    ``num_missing``: frames of the manager, since the engine joined it, that never came. ``cost``: what steps
    have come to take, from when that is something else than what it registered."""

    epoch: _Name
    stats: EngineStats
    sequence: _Count = 0
    num_missing: _Count = 0
    cost: StepCost | None = None


class FillDone(msgspec.Struct, frozen=True, tag=True):
    """Reply to the ``verb``-th verb of a call."""

    call_id: _Call
    verb: _Count
    num_tokens: _Count  # length of this Fill's part
    cached_tokens: _Count  # of which found in the cache


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of n generated ids and of the ``num_top`` likeliest ids at each place, likeliest
    first: those of the model itself, before any sampling parameter. Little-endian int32 and float32."""

    num_top: _Count
    token_ids: bytes  # [n]
    values: bytes  # [n]
    top_ids: bytes  # [n, num_top]
    top_values: bytes  # [n, num_top]


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """Text that became final in this step, for calls dispatched with ``stream``; ``logprobs`` has the ids
    that are whole in the text with it."""

    call_id: _Call
    verb: _Count
    text: str
    logprobs: Logprobs | None = None


class Timing(msgspec.Struct, frozen=True):
    """Life of one Generate on the engine's clock. Prefill is admitted..first_token of the first output."""

    received_us: _Count
    admitted_us: _Count
    first_token_us: _Count
    finished_us: _Count


class GenerateDone(msgspec.Struct, frozen=True, tag=True):
    """Reply to a Generate: the whole text (stop string and end-of-sequence cut) and the ids that stay in
    the context. ``logprobs``, if asked for, has the ids that are whole in the text."""

    call_id: _Call
    verb: _Count
    text: str
    token_ids: bytes
    num_generated: _Count  # tokens sampled, the cut ones included
    finish_reason: FinishReason
    timing: Timing
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class CallDone(msgspec.Struct, frozen=True, tag=True):
    """The call has left the engine; its context stays as cache under ``context_id``, ``num_tokens`` long."""

    call_id: _Call
    context_id: _Context
    num_tokens: _Count


class CallFailed(msgspec.Struct, frozen=True, tag=True):
    """The call has left the engine; outputs it had already replied stay valid."""

    call_id: _Call
    error: ErrorInfo


class ContextsEvicted(msgspec.Struct, frozen=True, tag=True):
    """These contexts lost KV; ``remaining`` is the length still cached for each."""

    context_ids: tuple[_Context, ...]
    remaining: tuple[_Count, ...]


class ContextSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Every context whose call has ended, with the length still cached: what earlier frames of the engine
    come to. The answer to ReportContexts."""

    context_ids: tuple[_Context, ...]
    lengths: tuple[_Count, ...]


Reply = FillDone | Chunk | GenerateDone | CallDone | CallFailed | ContextsEvicted | ContextSnapshot


class StepReplies(msgspec.Struct, frozen=True, tag=True):
    """All replies of one engine step, in order. ``manager_id`` is that of the manager which dispatched the
    calls: another one, which counts calls from 1 again, drops them. Empty: the engine knows only one.
    ``sequence`` counts an engine's StepReplies from 1, so that a lost one is noticed; 0 for an engine that
    does not count them."""

    epoch: _Name
    replies: tuple[Reply, ...]
    stats: EngineStats
    manager_id: _Text = ""
    sequence: _Count = 0


class Draining(msgspec.Struct, frozen=True, tag=True):
    """The engine should be sent no more calls: it ends when those that it has are done."""

    epoch: _Name
    reason: _Text


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The engine ends; calls it still has will get no reply."""

    epoch: _Name
    reason: _Text


FromEngine = Register | Heartbeat | StepReplies | Draining | Goodbye
