"""Messages from an engine to the manager."""

from __future__ import annotations

import msgspec

from ..errors import ErrorInfo
from .common import CallId, ContextId, FinishReason


class CostModel(msgspec.Struct, frozen=True):
    """step_us = base_us + per_sequence_us * batch + per_prefill_token_us * prefill tokens
    + per_kv_token_us * KV tokens loaded (a shared prefix counted once). ``capacity_tokens`` is what the KV
    cache holds. Measured by the engine at start, read by the scheduler."""

    base_us: float
    per_sequence_us: float
    per_prefill_token_us: float
    per_kv_token_us: float
    capacity_tokens: int
    num_blocks: int


class ModelInfo(msgspec.Struct, frozen=True):
    """What an engine serves. ``fingerprint`` is the hash of the model's files that decide token ids."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the engine started, and its present load; ``clock_us`` is the engine's clock now."""

    clock_us: int
    busy_us: int  # time spent inside steps that had work
    num_steps: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_held_blocks: int
    prefill_tokens: int  # computed
    decode_tokens: int
    cached_tokens: int  # prompt tokens whose KV was found in the cache
    forks: int  # contexts that started from a cached prefix
    cow_copies: int  # partial blocks copied on first write
    evicted_blocks: int
    hinted_contexts: int  # how often a context's future was made known (ContextUses)
    preemptions: int
    dropped_messages: int
    early_fills: int  # prefixes that were computed ahead of their calls to the end
    early_fill_tokens: int  # of prefill_tokens, those computed for early fills
    shared_decodes: int  # of decode_tokens, those whose attention read a prefix once for several calls
    expected_us: int = 0  # what the cost model that it registered says of the steps in busy_us
    calls_ended: int = 0
    turn_us: int = 0  # how long the loop's present turn has lasted; 0: it waits for work
    pool_breaches: int = 0  # how often the KV cache broke its invariant and was made anew


class Register(msgspec.Struct, frozen=True, tag=True):
    """First message of an engine, repeated until a Ping arrives and whenever ``manager_id`` changes.
    ``epoch`` differs at every start of the engine: a new one under an old name means the old one died."""

    protocol_version: int
    name: str
    epoch: str
    pid: int
    model: ModelInfo
    cost_model: CostModel
    max_batch_size: int
    sequence: int = 0  # of the last StepReplies before it


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every heartbeat, also while a long step runs. ``sequence``: of the last StepReplies before it.
    ``num_missing``: frames of the manager, since the engine joined it, that never came."""

    epoch: str
    stats: EngineStats
    sequence: int = 0
    num_missing: int = 0


class FillDone(msgspec.Struct, frozen=True, tag=True):
    """Reply to the ``verb``-th verb of a call."""

    call_id: CallId
    verb: int
    num_tokens: int  # length of this Fill's part
    cached_tokens: int  # of which found in the cache


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of n generated ids and of the ``num_top`` likeliest ids at each place, likeliest
    first: those of the model itself, before any sampling parameter. Little-endian int32 and float32."""

    num_top: int
    token_ids: bytes  # [n]
    values: bytes  # [n]
    top_ids: bytes  # [n, num_top]
    top_values: bytes  # [n, num_top]


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """Text that became final in this step, for calls dispatched with ``stream``; ``logprobs`` has the ids
    that are whole in the text with it."""

    call_id: CallId
    verb: int
    text: str
    logprobs: Logprobs | None = None


class Timing(msgspec.Struct, frozen=True):
    """Life of one Generate on the engine's clock. Prefill is admitted..first_token of the first output."""

    received_us: int
    admitted_us: int
    first_token_us: int
    finished_us: int


class GenerateDone(msgspec.Struct, frozen=True, tag=True):
    """Reply to a Generate: the whole text (stop string and end-of-sequence cut) and the ids that stay in
    the context. ``logprobs``, if asked for, has the ids that are whole in the text."""

    call_id: CallId
    verb: int
    text: str
    token_ids: bytes
    num_generated: int  # tokens sampled, the cut ones included
    finish_reason: FinishReason
    timing: Timing
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class CallDone(msgspec.Struct, frozen=True, tag=True):
    """The call has left the engine; its context stays as cache under ``context_id``, ``num_tokens`` long."""

    call_id: CallId
    context_id: ContextId
    num_tokens: int


class CallFailed(msgspec.Struct, frozen=True, tag=True):
    """The call has left the engine; outputs it had already replied stay valid."""

    call_id: CallId
    error: ErrorInfo


class ContextsEvicted(msgspec.Struct, frozen=True, tag=True):
    """These contexts lost KV; ``remaining`` is the length still cached for each."""

    context_ids: tuple[ContextId, ...]
    remaining: tuple[int, ...]


class ContextSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Every context whose call has ended, with the length still cached: what earlier frames of the engine
    come to. The answer to ReportContexts."""

    context_ids: tuple[ContextId, ...]
    lengths: tuple[int, ...]


Reply = FillDone | Chunk | GenerateDone | CallDone | CallFailed | ContextsEvicted | ContextSnapshot


class StepReplies(msgspec.Struct, frozen=True, tag=True):
    """All replies of one engine step, in order. ``manager_id`` is that of the manager which dispatched the
    calls: another one, which counts calls from 1 again, drops them. Empty: the engine knows only one.
    ``sequence`` counts an engine's StepReplies from 1, so that a lost one is noticed; 0 for an engine that
    does not count them."""

    epoch: str
    replies: tuple[Reply, ...]
    stats: EngineStats
    manager_id: str = ""
    sequence: int = 0


class Draining(msgspec.Struct, frozen=True, tag=True):
    """The engine should be sent no more calls: it ends when those that it has are done."""

    epoch: str
    reason: str


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The engine ends; calls it still has will get no reply."""

    epoch: str
    reason: str


FromEngine = Register | Heartbeat | StepReplies | Draining | Goodbye
