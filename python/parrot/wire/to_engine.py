"""Messages from the manager to an engine."""

from __future__ import annotations

from typing import Literal

import msgspec

from .common import CallId, ContextId, Objective


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


class Resend(msgspec.Struct, frozen=True, tag=True):
    """The StepReplies of this number is missing: it and all after it are to be sent again. An engine that has
    it no more does nothing."""

    sequence: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Manager's heartbeat, every second; an engine that hears none for its timeout ends itself.
    ``num_frames``: what else the manager has sent since the engine joined it, so that the engine can tell
    whether a message was lost on the way."""

    manager_id: str
    num_frames: int = 0


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End after the current step. ``refusal``: why the manager does not take the engine, if that is so."""

    refusal: str = ""


ToEngine = Dispatch | Abort | FreeContexts | ContextUses | ReportContexts | Resend | Ping | Shutdown
