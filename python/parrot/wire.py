"""Messages between manager and engines: msgspec structs in MessagePack, one message per ZeroMQ frame.

The manager binds a ROUTER, each engine connects a DEALER. Nothing on the socket is ever unpickled or
evaluated; a frame that does not decode into one of these types is counted, logged and dropped by the
receiver (:class:`WireError`). Times are microseconds of CLOCK_MONOTONIC unless a name says otherwise.

One *call* is one run of a semantic function (or a part of one whose later inputs do not exist yet). All its
verbs travel in one :class:`Dispatch`; replies come per verb. Token ids travel as little-endian int32 bytes.
"""

from __future__ import annotations

from typing import Literal, NewType

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import ErrorInfo, ParrotError

PROTOCOL_VERSION = 3

CallId = NewType("CallId", int)  # unique for the life of a manager, never reused
PUBLIC_DOMAIN = 0  # of text that the operator published; tenants have numbers from 1
ContextId = NewType("ContextId", int)  # unique for the life of a manager, never reused; 0 = no context
Ids = npt.NDArray[np.int32]
Objective = Literal["LATENCY", "THROUGHPUT"]
FinishReason = Literal["stop", "length"]


class WireError(ParrotError):
    """A frame that is not a message of this protocol."""

    code = "wire_error"


def pack_ids(ids: npt.ArrayLike) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> Ids:
    """Inverse of :func:`pack_ids`; a read-only int32 array of shape [len(data) / 4]."""
    if len(data) % 4:
        raise WireError(f"token ids of {len(data)} bytes are not a whole number of int32")
    return np.frombuffer(data, dtype="<i4")


class Grammar(msgspec.Struct, frozen=True):
    """What the text of an output must be. ``source`` is a JSON schema as text, a regular expression that the
    whole text matches, or a JSON list of the texts to choose from."""

    kind: Literal["schema", "regex", "choices"]
    source: str


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one output is decoded; docs/sampling.md defines each parameter and their order.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``stop`` strings and
    ``stop_token_ids`` end the output and are cut. ``logprobs``: None for none, else how many alternatives
    go with each id's own."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # first Generate of a call only: of the ids before it
    grammar: Grammar | None = None


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Put tokens into a context. The first Fill of a call carries every id of the prompt from position 0,
    whatever ``parent_context_id`` says: the parent is a hint, the engine matches by tokens. Later Fills of
    the same call append to the context.

    ``[0, public_len)`` of the first Fill belong to the public domain, everything else of a call to its own:
    KV depends on all that is before it, so what everybody may share is always a beginning."""

    token_ids: bytes
    context_id: ContextId
    parent_context_id: ContextId = ContextId(0)
    public_len: int = 0


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Decode onto the end of a context until a stop condition."""

    sampling: Sampling
    context_id: ContextId
    parent_context_id: ContextId = ContextId(0)


class FreeContext(msgspec.Struct, frozen=True, tag=True):
    """The manager will not name this context again; its KV may be evicted first."""

    context_id: ContextId


Verb = Fill | Generate | FreeContext


# --- manager -> engine -------------------------------------------------------------------------------------


class Dispatch(msgspec.Struct, frozen=True, tag=True):
    """Run a call. ``domain`` >= 1 isolates tenants: beyond published text (Fill) only contexts of the same
    domain share KV.
    ``app_arrival_us`` orders the engine's waiting queue and preemption (wall-independent, manager clock).
    ``early_fill``: a prefix that calls which wait for inputs will begin with, one Fill; it is computed when
    the engine has time to spare, and is cache as soon as it is there."""

    call_id: CallId
    domain: int
    app_arrival_us: int
    objective: Objective
    verbs: tuple[Verb, ...]
    stream: bool = False  # send a Chunk for every step that adds text
    early_fill: bool = False


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop these calls within one step; unknown ids are ignored. No reply follows for them."""

    call_ids: tuple[CallId, ...]


class FreeContexts(msgspec.Struct, frozen=True, tag=True):
    """FreeContext for contexts whose call has ended."""

    context_ids: tuple[ContextId, ...]


class ContextUses(msgspec.Struct, frozen=True, tag=True):
    """What is known of the future of contexts whose call has ended, in place of what was: the first
    ``prefix_lengths[i]`` tokens have ``remaining_uses[i]`` more uses, the next one in
    ``steps_to_next_use[i]`` steps of the graph, and the tokens behind them have none. Unknown contexts are
    ignored. Eviction goes by it (docs/kvcache.md)."""

    context_ids: tuple[ContextId, ...]
    prefix_lengths: tuple[int, ...]
    remaining_uses: tuple[int, ...]
    steps_to_next_use: tuple[int, ...]


class ReportContexts(msgspec.Struct, frozen=True, tag=True):
    """A frame of the engine was lost: what it said of contexts is to be said again (ContextSnapshot)."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Manager's heartbeat, every second; an engine that hears none for its timeout ends itself.
    ``num_frames``: what else the manager has sent since the engine joined it, so that the engine can tell
    whether a message was lost on the way."""

    manager_id: str
    num_frames: int = 0


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End after the current step."""


ToEngine = Dispatch | Abort | FreeContexts | ContextUses | ReportContexts | Ping | Shutdown


# --- engine -> manager -------------------------------------------------------------------------------------


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


def max_cached_contexts(num_blocks: int) -> int:
    """Contexts of ended calls that an engine keeps, the newest, and that the manager knows of it. Many can
    end in the same few blocks, so that the cache alone would not bound them."""
    return max(1024, num_blocks)


_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Raises :class:`WireError` for anything that is not a message for an engine."""
    try:
        return _to_engine.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a message for an engine: {error}") from None


def decode_from_engine(frame: bytes) -> FromEngine:
    """Raises :class:`WireError` for anything that is not a message from an engine."""
    try:
        return _from_engine.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a message from an engine: {error}") from None
