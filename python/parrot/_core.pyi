"""The native core: KV cache, scheduler, CPU kernels. State machines without clock or I/O, one thread at a
time each.

Arrays are numpy, C-contiguous, aligned, of exactly the dtype given; those that are written are writable and
lie over no other argument. What is wrong raises ``ValueError`` (``KeyError`` for an unknown id, ``TypeError``
for another type, flags are ``bool`` only) naming argument and values. Ranges are half-open. Classes have no
subclasses.
"""

from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]

class OutOfBlocks(RuntimeError):
    """The pool has too few free and evictable blocks for a reservation; nothing was changed."""

@final
class ContextTree:
    """Token sequences with their KV blocks, as a tree by shared prefix (paper sections 5.3 and 7).

    A node owns a half-open token range and the blocks that hold it; a block whose slots belong to two nodes
    is reference-counted, and copied on the first write into it. A context is a named end of a path:
    *held* (a running call: its blocks stay) or *cached* (its blocks may be evicted, from the leaves, the
    least valuable first: see :meth:`set_uses`). Tokens are matched by content, only within one isolation
    domain, and only once their KV is computed (committed).

    Domain 0 is the public one: text that the operator published. A prompt whose first ``public_len`` tokens
    are published has those in the public domain, where the prompts of all domains find them, and the rest in
    its own.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None: ...
    def open(self, context_id: int, domain: int, token_ids: I32, max_prefix: int, public_len: int = 0) -> int:
        """Create a held context on the longest committed prefix of ``token_ids[:max_prefix]``, of which
        ``[0, public_len)`` is in the public domain and the rest in ``domain``; return its length. Takes no
        block. ``context_id`` must be new. ``token_ids`` may be empty."""
    def fork(self, context_id: int, parent_context_id: int, length: int) -> None:
        """Create a held context on the first ``length`` committed tokens of another, at any offset. All
        that is appended to it belongs to the domain of its parent."""
    def pending_prefix(self, domain: int, token_ids: I32, public_len: int = 0) -> int:
        """Longest prefix that is in the tree already, counting tokens that are reserved but not committed:
        a caller may wait for them instead of computing them twice."""
    def reserve(self, context_ids: I64, counts: I32, token_ids: I32, slots: I32) -> I32:
        """Append ``counts[i]`` tokens to each held context, in one step for the whole batch, all or nothing.

        ``token_ids`` [sum(counts)] are concatenated; ``slots`` [sum(counts)] receives block * block_size +
        offset of each token. Returns copies [n, 3]: (source block, destination block, slots to copy from
        offset 0), to be carried out before the step writes. Evicts cached blocks when free ones run out;
        raises OutOfBlocks when that is not enough. A context may have one open reservation. One that goes
        over the end of the published text is a ValueError: that is two, with a commit between."""
    def commit(self, context_ids: I64) -> None:
        """The reserved tokens of these contexts now have their KV: they can be matched and forked."""
    def set_last_tokens(self, context_ids: I64, token_ids: I32) -> None:
        """The last reserved token of each of these contexts is this one [n], whatever ``reserve`` was told: of
        an open reservation, before its commit."""
    def rollback(self, context_ids: I64) -> None:
        """Undo open reservations (a failed step)."""
    def truncate(self, context_id: int, length: int) -> None:
        """Shorten a held context to ``length`` committed tokens (a cut stop string). What is appended behind
        a cut in published text belongs to the context's domain."""
    def lengths(self, context_ids: I64, out: I32) -> None:
        """Length of each context with its open reservation, into ``out`` [n]."""
    def num_distinct_tokens(self, context_ids: I64) -> int:
        """Tokens of these contexts together, reserved ones too; one that several share counts once."""
    def block_tables(self, context_ids: I64, out: I32) -> None:
        """Block ids of each context in order into ``out`` [n, max_blocks], -1 past the end."""
    def release(self, context_id: int) -> None:
        """Held becomes cached; an open reservation is rolled back."""
    def free(self, context_id: int) -> None:
        """Forget the name; its unshared blocks become the first to be evicted. Held contexts too."""
    def set_uses(
        self, context_ids: I64, prefix_lengths: I32, remaining_uses: I32, steps_to_next_use: I32
    ) -> None:
        """What is known of the future of cached contexts, in place of what was; all arrays [n], >= 0.

        The first ``prefix_lengths[i]`` tokens (or all that is left, if that is less) have
        ``remaining_uses[i]`` more uses (only whether it is 0 counts), the next one in
        ``steps_to_next_use[i]`` steps; what is behind them has none. Eviction takes what no context names,
        then what has no use, then the farthest next use, then the least recently used. A context without
        hints counts as used in 16 steps; a hint lapses when 8 pools of blocks were evicted since it came."""
    def take_evicted(self) -> list[tuple[int, int]]:
        """(context_id, remaining committed length) of contexts that lost tokens since the last call."""
    def clear_cache(self) -> None:
        """Evict everything that no held context needs."""
    def reset(self) -> None:
        """Forget all contexts, also when an invariant is broken: every block is free again."""
    def tokens(self, context_id: int) -> I32:
        """The committed tokens of a context (for tests and debugging)."""
    def check_invariants(self) -> None:
        """Raise RuntimeError if free + evictable + held != total, a reference count is off, or ranges gap."""
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_evictable_blocks(self) -> int: ...
    @property
    def num_held_blocks(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    def counters(self) -> dict[str, int]:
        """matched_tokens, forks (opens and forks with a prefix > 0), cow_copies, evicted_blocks."""

def cpu_isas() -> list[str]:
    """Instruction sets of the CPU kernels that this CPU supports, each with the ones before it: "scalar",
    "avx2", "avx512", "avx512bf16"."""

def cpu_isa() -> str:
    """The set in use: the last of :func:`cpu_isas`, unless the environment's PARROT_CPU_ISA or
    :func:`set_cpu_isa` say otherwise. Raises ValueError for a wrong PARROT_CPU_ISA."""

def set_cpu_isa(isa: str) -> None:
    """Use another set in this process; "" as at the start. Raises ValueError for one that is not supported."""

def cpu_threads() -> int:
    """Threads that a CPU kernel uses unless told otherwise; at first the CPUs this process may run on."""

def set_cpu_threads(num_threads: int) -> None:
    """Raises ValueError outside [1, 1024]."""

def count_cpu_parts(num_parts: int, repeats: int = 1) -> list[int]:
    """How often each part ran over ``repeats`` parallel regions of ``num_parts`` (for tests and timing)."""

def sum_cpu_words(words: I64, num_threads: int) -> int:
    """Sum of ``words``, modulo 2**64; for timing how fast memory is read."""

@final
class TensorView:
    """A tensor of the caller, which must live for as long as this is used."""

    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        """``strides`` in elements. What does not fit is said where it is used."""
    @property
    def address(self) -> int: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def strides(self) -> list[int]: ...

@final
class CpuAttention:
    """Paged attention of one step on the CPU, for one model shape: plan once per step, run once per layer.

    Decoding sequences that name the same physical blocks read them once (paper section 5.3); chunks of
    prefill are causal over all that their sequence has. Sums are fp32. One thread at a time: RuntimeError for
    a second one. ``head_dim`` is a multiple of 16 up to 512, ``dtype`` "float32" or "bfloat16", that of
    queries, cache and output; a model has at most 65,536 heads, a sequence 2**30 tokens. Raises ValueError
    naming argument and values.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str) -> None: ...
    def plan(
        self,
        query_start: I32,
        seq_lens: I32,
        block_tables: I32,
        num_blocks: int,
        *,
        num_threads: int = 0,
        share: bool = True,
        min_shared_tokens: int = 64,
    ) -> None:
        """Sequence i has the rows [query_start[i], query_start[i + 1]), its last tokens of ``seq_lens[i]``.
        ``block_tables`` [n, max_blocks] is not looked at past a sequence's end; ``num_blocks``: those of the
        cache. ``num_threads`` 0: :func:`cpu_threads`."""
    def run(
        self, query: TensorView, k_cache: TensorView, v_cache: TensorView, out: TensorView, scale: float
    ) -> None:
        """Fill ``out`` [rows, heads, head_dim] from ``query`` of that shape and the caches
        [num_blocks, 16, kv_heads, head_dim], contiguous; rows of query and out may lie apart. Slots past a
        sequence's end may hold anything. Raises RuntimeError without a plan. Releases the GIL."""
    @property
    def num_items(self) -> int:
        """Pieces of work of the plan."""
    @property
    def num_partials(self) -> int:
        """Rows of partial results that the plan merges."""
    @property
    def num_sharing(self) -> int:
        """Decodes of the plan that read a part of their tokens together with others."""

@final
class AttentionPlanner:
    """Plans SharedPrefixAttention step after step. While the requests (rows) are the same and only grew, who
    shares what is not looked for again; the plan is the one of a new planner. Requests that come to share a
    block behind all they had at the last search are an exception that no copy-on-write cache makes: each
    reads it for itself."""

    def __init__(self) -> None: ...
    def plan(
        self,
        block_tables: I32,
        seq_lens: I32,
        entries: I32,
        members: I32,
        part_begin: I32,
        *,
        group_size: int,
        num_kv_heads: int,
        num_workers: int,
        block_size: int = 16,
        max_rows: int = 64,
        min_shared_tokens: int = 64,
        min_chunk_tokens: int = 128,
        share: bool = True,
        entry_tokens: int = 110,
        own_entry_tokens: int = 5,
        row_tokens: int = 5,
    ) -> tuple[int, int, int]:
        """Plan one decode step from ``block_tables`` [n, max_blocks] and ``seq_lens`` [n]: requests that name
        the same physical blocks share them. Fills the caller's buffers ``entries`` [., 8], ``members``
        [., 2] and ``part_begin`` [>= n + 1] (csrc/kvcache/attention_plan.h) and returns (entries, members,
        parts) used. ``entry_tokens`` (of one that several requests share), ``own_entry_tokens`` and
        ``row_tokens``: what an entry and each of its query rows cost besides its tokens. Raises ValueError
        for a bad length, block or cost, or a buffer too small."""
    @property
    def num_searches(self) -> int:
        """How often the shared structure was looked for."""
    @property
    def max_block(self) -> int:
        """The largest block id that a request of the last step reads; -1: there is none."""
    @property
    def num_sharing(self) -> int:
        """Requests of the last step that some entry reads together with others."""

Reason = Literal["group", "sharers", "prefix", "alone"]

@final
class Placement:
    """One decision of Algorithm 1."""

    call_id: int
    engine_id: int
    parent_context_id: int  # 0: none known
    prefix_len: int  # tokens expected in that context
    reason: Reason
    score_us: float  # estimated finish time plus harm, the lower the better

@final
class Candidate:
    """One engine that FindEngine looked at for a call; the parts of its score, in microseconds."""

    engine_id: int
    admissible: bool
    prefix_len: int
    queue_us: float
    prefill_us: float
    decode_us: float
    harm_us: float
    score_us: float

@final
class PrefixIndex:
    """Who has which token prefix (paper section 5.3): queued calls and engine contexts, found in one look-up.

    Every boundary of a prompt is a key: a keyed 128-bit hash over (model, adapter, domain, ids). Content is
    compared on a hit, so that a collision never yields a wrong match. Prefixes of another ``model``,
    ``adapter`` or ``domain`` never match, except for published text: boundaries up to ``public_len``, which
    is 0 or one of them, are in the public domain 0 whatever the ``domain``, and the ones behind it match only
    those of the same domain and the same ``public_len``.

    ``token_ids`` [n] are ids >= 0; ``boundaries`` [m] are prefix lengths, ascending, 0 < b <= n. A *call* may
    wait for variables that have no value yet: in place of an id, ``-1 - i`` stands for ``variables[i]`` and is
    one position long. A boundary behind it is known by the variable's id, so that calls which share a pending
    variable share that prefix before its text exists. Ids of calls and of contexts are independent of each
    other, from 1 to 2**62 - 1; those of variables are >= 0.

    ``hash_key`` is 16 random bytes per process; ``constant_hash`` (tests only) makes every hash equal."""

    def __init__(self, hash_key: bytes, constant_hash: bool = False) -> None: ...
    def add_call(
        self,
        call_id: int,
        domain: int,
        token_ids: I32,
        boundaries: I32,
        *,
        variables: Sequence[int] = (),
        model: int = 0,
        adapter: int = 0,
        public_len: int = 0,
    ) -> None:
        """Register a queued call at every boundary, until ``remove_call``. ValueError if it is there."""
    def add_context(
        self,
        context_id: int,
        domain: int,
        token_ids: I32,
        boundaries: I32,
        *,
        model: int = 0,
        adapter: int = 0,
        public_len: int = 0,
    ) -> None:
        """Register what an engine's context holds, until ``remove_context``. ValueError if it is there."""
    def remove_call(self, call_id: int) -> None:
        """The call has been placed or is gone. KeyError if it is not there."""
    def remove_context(self, context_id: int) -> None:
        """The engine holds nothing of it any more. KeyError if it is not there."""
    def shorten_context(self, context_id: int, length: int) -> None:
        """Drop the context's boundaries beyond ``length`` tokens (an eviction). KeyError if it is not there."""
    def set_variable(self, variable_id: int, token_ids: I32) -> int:
        """The variable's text is ``token_ids``, which may be empty: in every call that waits for it the ids
        take its place, and boundaries behind it move along. From now on these calls match prompts that had
        the text all along. Returns how many calls waited. The text is not kept: calls added later bring it."""
    def match(
        self,
        domain: int,
        token_ids: I32,
        boundaries: I32,
        *,
        variables: Sequence[int] = (),
        model: int = 0,
        adapter: int = 0,
        public_len: int = 0,
        max_owners: int = 16,
    ) -> list[tuple[int, list[int], list[int]]]:
        """(boundary, call ids, context ids), the longest boundary first: who shares how much of a prompt.

        Each owner is listed once, at the longest of ``boundaries`` where it is registered, the newest first.
        At most ``max_owners`` calls and as many contexts are listed in all, so the nearest ones. For a
        waiting call the first row with another call names those that share its longest prefix; for a ready
        one the first row with contexts says where most of it is. A call that is registered finds itself."""
    def check_invariants(self) -> None:
        """Raise RuntimeError if a prefix is kept without an owner, or a list or the hash table is corrupt."""
    def __len__(self) -> int:
        """Number of distinct prefixes that have an owner."""
    @property
    def num_bytes(self) -> int:
        """Memory of prefixes and owners, without what the allocator adds."""
    @property
    def num_collisions(self) -> int:
        """How often a look-up met another prefix of the same hash, which only the comparison told apart."""

class QueueFull(RuntimeError):
    """One more call does not fit into the scheduler's queue; the message names the bound and its value."""

@final
class Scheduler:
    """Algorithm 1 (paper section 5.4): events in, placements out. Times are microseconds, given by the caller.

    Every switch turns one feature off. ``max_queued`` bounds the queued calls of all tenants together,
    ``max_queued_per_tenant`` those of each. ``full_scan`` (tests only) looks at every call and every engine
    each time instead of what has changed and a shortlist."""

    def __init__(
        self,
        *,
        hash_key: bytes,
        group_placement: bool = True,
        prefix_affinity: bool = True,
        splitting: bool = True,
        replication: bool = True,
        objective_aware: bool = True,
        application_order: bool = True,
        tenant_shares: bool = True,
        aging: bool = True,
        latency_capacity_tokens: int = 6144,
        aging_us: int = 10_000_000,
        max_queued: int = 1_000_000,
        max_queued_per_tenant: int = 1_000_000,
        full_scan: bool = False,
        constant_hash: bool = False,
    ) -> None: ...
    def add_engine(
        self,
        engine_id: int,
        *,
        base_us: float,
        per_sequence_us: float,
        per_prefill_token_us: float,
        per_kv_token_us: float,
        capacity_tokens: int,
        max_batch_size: int,
        model: int = 0,
    ) -> None:
        """An engine that takes calls of ``model``. Costs are in microseconds: ``step = base + per_sequence *
        batch + per_prefill_token * prefill + per_kv_token * KV tokens``."""
    def remove_engine(self, engine_id: int) -> list[int]:
        """The engine is gone: forget its contexts; return its calls in flight, which leave the scheduler."""
    def set_paused(self, engine_id: int, paused: bool) -> None:
        """A paused engine takes no more calls; those that it has go on."""
    def set_slowdown(self, engine_id: int, slowdown: float) -> None:
        """The engine's steps take ``slowdown`` times what its cost model says, until told otherwise."""
    def set_cost(
        self,
        engine_id: int,
        *,
        base_us: float,
        per_sequence_us: float,
        per_prefill_token_us: float,
        per_kv_token_us: float,
    ) -> None:
        """The engine has measured its steps anew: this is what they take, without any slowdown, from now on."""
    def submit(
        self,
        call_id: int,
        *,
        app_id: int,
        app_arrival_us: int,
        now_us: int,
        domain: int,
        latency: bool,
        group_id: int,
        depth: int,
        token_ids: I32,
        boundaries: I32,
        max_new_tokens: int,
        model: int = 0,
        adapter: int = 0,
        tenant: int | None = None,
        start_by_us: int | None = None,
        per_token_us: float = 0.0,
        public_len: int = 0,
        app_ran_us: int | None = None,
    ) -> None:
        """Queue a ready call; it goes to an engine of its ``model`` only, and shares prefixes with calls of
        its ``model``, ``adapter`` and ``domain``, and those up to ``public_len``, which is 0 or one of the
        boundaries, with calls of any domain (see :class:`PrefixIndex`). ``tenant`` (its domain when not
        given) is who it is accounted to. ``group_id`` < 0: none. ``depth``: longest path to the annotated
        variable, so that the deepest goes first within an application. ``boundaries``: prefix lengths that
        no later text can change, ascending. ``start_by_us``: the latest start that keeps a target in time;
        ``per_token_us``: what a token of a latency-bound call may take, 0 if it has not said.
        ``app_ran_us``: for how long some call of the application has been in flight, all the time since its
        arrival when not given. Raises :class:`QueueFull`, and nothing is changed."""
    def set_tenant_weight(self, tenant: int, weight: float) -> None:
        """The tenant's share of the work placed while several have calls queued, 1 unless told;
        1e-6 to 1e6."""
    def set_objective(
        self,
        call_id: int,
        *,
        latency: bool,
        group_id: int,
        depth: int,
        start_by_us: int | None = None,
        per_token_us: float = 0.0,
    ) -> None:
        """A label arrived for a queued or running call; unknown ids are ignored."""
    def cancel(self, call_id: int) -> bool:
        """Drop a queued call or one in flight; False if unknown."""
    def schedule(self, now_us: int) -> list[Placement]:
        """Place every queued call that an engine can take now, best first; the rest stay queued."""
    def finish(self, call_id: int, *, now_us: int, context_id: int, num_tokens: int) -> None:
        """A call left its engine; with ``context_id`` > 0 its context stays there as a prefix holder."""
    def add_context(
        self,
        engine_id: int,
        context_id: int,
        *,
        domain: int,
        token_ids: I32,
        boundaries: I32,
        model: int = 0,
        adapter: int = 0,
        public_len: int = 0,
    ) -> None:
        """The engine computes these ids ahead of the calls that begin with them: it has what lies before the
        boundaries, or is about to. ``context_id`` > 0, not one that is there already."""
    def forget_context(self, engine_id: int, context_id: int, remaining: int) -> None:
        """An engine evicted (part of) a context; ``remaining`` tokens of it are left."""
    def explain(self, call_id: int) -> list[Candidate]:
        """The candidates of the last decision for a call that is queued or in flight, best first."""
    def candidates(
        self,
        *,
        now_us: int,
        domain: int,
        latency: bool,
        token_ids: I32,
        boundaries: I32,
        max_new_tokens: int,
        model: int = 0,
        adapter: int = 0,
        public_len: int = 0,
    ) -> list[Candidate]:
        """Where a call that is not there would be best off: the best 16 engines, of many those of a
        shortlist, best first. Changes nothing."""
    def engine_load(self, engine_id: int) -> tuple[int, int]:
        """(calls in flight, tokens they hold with a shared prefix counted once)."""
    def check_invariants(self) -> None: ...
    @property
    def num_queued(self) -> int: ...
    @property
    def num_in_flight(self) -> int: ...
    def counters(self) -> dict[str, int]:
        """placed, placed_group, placed_sharers, placed_prefix, placed_alone, splits (of sets), replications (calls
        placed where less of their prompt is than some other engine has), deferred, holds."""

@final
class PackedLinear:
    """The weight of a linear layer in the order in which the CPU kernels read it: a copy.

    ``weight`` [out_features, in_features]: float32, or bfloat16 as uint16 bits. ``gated``: its rows are
    [gate; up], and the layer gives silu(x gate^T) * (x up^T).
    """

    def __init__(self, weight: F32 | U16, *, gated: bool = False) -> None: ...
    def forward(
        self, x: F32 | U16, out: F32, norm: F32 | None = None, eps: float = 0.0, *, add: bool = False
    ) -> None:
        """``out`` [rows, num_outputs] = (or with ``add``, +=) linear(``x`` [rows, in_features]). With ``norm``
        [in_features], ``x`` (float32) goes through RMSNorm first. ``out`` must not overlap ``x``."""
    def gather(self, rows: I64, out: F32) -> None:
        """Rows of the weight as float32: ``out`` [n, in_features]. Not of a gated layer."""
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def num_outputs(self) -> int:
        """``out_features``, or half of them if gated."""
    @property
    def num_bytes(self) -> int: ...

def argmax_rows(logits: F32, ids: I64) -> None:
    """``ids`` [n]: index of the largest of each row of ``logits`` [n, vocab], the lowest of equal ones; -1 for
    a row with a NaN or an infinity."""

def rope_append(
    qkv: F32, cos: F32, sin: F32, slots: I64, query: F32 | U16, key_cache: F32 | U16, value_cache: F32 | U16
) -> None:
    """Rotary embedding of ``qkv`` [T, (heads + 2 kv_heads) * head_dim] by ``cos``, ``sin`` [T, head_dim / 2].

    Queries go to ``query`` [T, heads, head_dim], keys and values to ``slots`` [T] (distinct) of the caches
    [num_blocks, block_size, kv_heads, head_dim]; the three are float32, or bfloat16 as uint16 bits.
    """
