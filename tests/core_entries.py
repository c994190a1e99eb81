"""How the entries of tree, scheduler and prefix index are called, and the kinds of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from core_kinds import KEY, Kind, array, flag, integers, key, real, whole
from parrot import _core


@dataclass(frozen=True)
class Entry:
    """``make`` returns a new object's verb and arguments that it takes, any number of times."""

    make: Callable[[], tuple[Callable[..., Any], dict[str, Any]]]
    kinds: dict[str, Kind]


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def i64(*values: int) -> Any:
    return np.array(values, np.int64)


def undone(verb: Callable[..., Any], undo: Callable[[], Any]) -> Callable[..., Any]:
    """The verb, and what it did taken back, so that it can be called again."""

    def call(**arguments: Any) -> Any:
        result = verb(**arguments)
        undo()
        return result

    return call


def prepared(verb: Callable[..., Any], prepare: Callable[[], Any]) -> Callable[..., Any]:
    """The verb, after what it needs was made sure of."""

    def call(**arguments: Any) -> Any:
        prepare()
        return verb(**arguments)

    return call


# The context tree: context 1 is held and has 20 tokens, context 2 is cached.


def tree() -> _core.ContextTree:
    made = _core.ContextTree(16)
    for context_id in (1, 2):
        made.open(context_id, 0, i32(*range(20)), 0)
        made.reserve(i64(context_id), i32(20), np.arange(20, dtype=np.int32), np.zeros(20, np.int32))
        made.commit(i64(context_id))
    made.release(2)
    return made


def tree_entry(verb: str, arguments: dict[str, Any], kinds: dict[str, Kind], **ways: Any) -> Entry:
    """``before`` and ``after`` are done around each call; both take the tree."""

    def make() -> tuple[Callable[..., Any], dict[str, Any]]:
        made = tree()
        call = getattr(made, verb)
        if "after" in ways:
            call = undone(call, lambda: ways["after"](made))
        if "before" in ways:
            call = prepared(call, lambda: ways["before"](made))
        return call, dict(arguments)

    return Entry(make, kinds)


def reserved(made: _core.ContextTree) -> None:
    made.reserve(i64(1), i32(2), i32(7, 8), np.zeros(2, np.int32))


def rolled_back(made: _core.ContextTree) -> None:
    made.rollback(i64(1))


def cut(made: _core.ContextTree) -> None:
    made.truncate(1, 20)


def reopened(made: _core.ContextTree) -> None:
    try:
        made.lengths(i64(3), np.zeros(1, np.int32))
    except KeyError:
        made.open(3, 0, i32(), 0)


TOKENS = array(low=0)
CONTEXTS = array()
TREE = {
    "ContextTree.__init__": Entry(
        lambda: (_core.ContextTree, {"num_blocks": 8, "block_size": 16}),
        {"num_blocks": whole(1, 2**31 // 16), "block_size": whole(1, 2**31)},
    ),
    "ContextTree.open": tree_entry(
        "open",
        {"context_id": 9, "domain": 5, "token_ids": i32(1, 2), "max_prefix": 2, "public_len": 1},
        {"context_id": whole(1), "domain": whole(), "token_ids": TOKENS, "max_prefix": whole(0, 2),
         "public_len": whole(0, 2)},
        after=lambda made: made.free(9),
    ),
    "ContextTree.fork": tree_entry(
        "fork",
        {"context_id": 9, "parent_context_id": 1, "length": 3},
        {"context_id": whole(1), "parent_context_id": whole(1), "length": whole(0, 20)},
        after=lambda made: made.free(9),
    ),
    "ContextTree.pending_prefix": tree_entry(
        "pending_prefix",
        {"domain": 0, "token_ids": i32(1, 2), "public_len": 0},
        {"domain": whole(), "token_ids": TOKENS, "public_len": whole(0, 2)},
    ),
    "ContextTree.reserve": tree_entry(
        "reserve",
        {"context_ids": i64(1), "counts": i32(2), "token_ids": i32(3, 4), "slots": i32(0, 0)},
        {"context_ids": CONTEXTS, "counts": array(low=1, high=2), "token_ids": TOKENS,
         "slots": array(output=True)},
        after=rolled_back,
    ),
    "ContextTree.commit": tree_entry(
        "commit", {"context_ids": i64(1)}, {"context_ids": CONTEXTS},
        before=lambda made: (rolled_back(made) if pending(made) else None, reserved(made)), after=cut,
    ),
    "ContextTree.set_last_tokens": tree_entry(
        "set_last_tokens", {"context_ids": i64(1), "token_ids": i32(5)},
        {"context_ids": CONTEXTS, "token_ids": TOKENS},
        before=lambda made: None if pending(made) else reserved(made),
    ),
    "ContextTree.rollback": tree_entry(
        "rollback", {"context_ids": i64(1)}, {"context_ids": CONTEXTS},
        before=lambda made: None if pending(made) else reserved(made),
    ),
    "ContextTree.truncate": tree_entry(
        "truncate", {"context_id": 1, "length": 20}, {"context_id": whole(1), "length": whole(0, 20)}
    ),
    "ContextTree.release": tree_entry(
        "release", {"context_id": 3}, {"context_id": whole(1)}, before=reopened,
        after=lambda made: made.free(3),
    ),
    "ContextTree.free": tree_entry("free", {"context_id": 3}, {"context_id": whole(1)}, before=reopened),
    "ContextTree.set_uses": tree_entry(
        "set_uses",
        {"context_ids": i64(2), "prefix_lengths": i32(3), "remaining_uses": i32(1),
         "steps_to_next_use": i32(1)},
        {"context_ids": CONTEXTS, "prefix_lengths": array(low=0), "remaining_uses": array(low=0),
         "steps_to_next_use": array(low=0)},
    ),
    "ContextTree.lengths": tree_entry(
        "lengths", {"context_ids": i64(1, 2), "out": i32(0, 0)},
        {"context_ids": CONTEXTS, "out": array(output=True)},
    ),
    "ContextTree.num_distinct_tokens": tree_entry(
        "num_distinct_tokens", {"context_ids": i64(1, 2)}, {"context_ids": CONTEXTS}
    ),
    "ContextTree.block_tables": tree_entry(
        "block_tables", {"context_ids": i64(1), "out": np.zeros((1, 2), np.int32)},
        {"context_ids": CONTEXTS, "out": array(output=True)},
    ),
    "ContextTree.tokens": tree_entry("tokens", {"context_id": 1}, {"context_id": whole(1)}),
}  # fmt: skip


def pending(made: _core.ContextTree) -> bool:
    lengths = np.zeros(1, np.int32)
    made.lengths(i64(1), lengths)
    return bool(lengths[0] > 20)


# The scheduler: engine 0 and call 1, which is in flight; engine 1 is paused.

SCOPE = {"domain": 0, "model": 0, "adapter": 0, "public_len": 2}
PROMPT = {"token_ids": i32(1, 2, 3), "boundaries": i32(2, 3)}
SCOPE_KINDS = {"domain": whole(), "model": whole(), "adapter": whole(), "public_len": whole(0, 3)}
PROMPT_KINDS = {"token_ids": TOKENS, "boundaries": array(low=1, high=3)}
COSTS = {"base_us": 8_000.0, "per_sequence_us": 40.0, "per_prefill_token_us": 25.0, "per_kv_token_us": 0.1}
ENGINE = {**COSTS, "capacity_tokens": 1000, "max_batch_size": 4, "model": 0}
OBJECTIVE = {"latency": True, "group_id": -1, "depth": 0, "start_by_us": 5, "per_token_us": 1.0}
OBJECTIVE_KINDS = {
    "latency": flag,
    "group_id": whole(),
    "depth": whole(0, 2**31 - 1),
    "start_by_us": whole(-(2**60), 2**60, none=True),
    "per_token_us": real(0, 86.4e9),
}
TIME = whole(0, 2**60)
TOKEN_COUNT = whole(0, 2**30 - 1)
CALL = {"app_id": 1, "app_arrival_us": 0, "now_us": 0, "max_new_tokens": 4, "tenant": 3, **PROMPT, **SCOPE}


def scheduler() -> _core.Scheduler:
    made = _core.Scheduler(hash_key=KEY)
    made.add_engine(0, **ENGINE)
    made.add_engine(1, **ENGINE)
    made.set_paused(1, True)
    made.submit(1, **CALL, **OBJECTIVE)
    assert made.schedule(0)
    return made


def scheduler_entry(verb: str, arguments: dict[str, Any], kinds: dict[str, Kind], **ways: Any) -> Entry:
    def make() -> tuple[Callable[..., Any], dict[str, Any]]:
        made = scheduler()
        call = getattr(made, verb)
        if "after" in ways:
            call = undone(call, lambda: ways["after"](made))
        return call, dict(arguments)

    return Entry(make, kinds)


def again(made: _core.Scheduler) -> None:
    made.submit(1, **CALL, **OBJECTIVE)
    assert made.schedule(0)


SWITCHES = (
    "group_placement", "prefix_affinity", "splitting", "replication", "objective_aware", "application_order",
    "tenant_shares", "aging", "full_scan", "constant_hash",
)  # fmt: skip
SCHEDULER = {
    "Scheduler.__init__": Entry(
        lambda: (
            _core.Scheduler,
            {"hash_key": KEY, "latency_capacity_tokens": 6144, "aging_us": 10, "max_queued": 5,
             "max_queued_per_tenant": 5, **dict.fromkeys(SWITCHES, True)},
        ),
        {"hash_key": key, "latency_capacity_tokens": whole(1, 2**40),
         "aging_us": whole(1, 2**50), "max_queued": whole(1, 2**31), "max_queued_per_tenant": whole(1, 2**31),
         **dict.fromkeys(SWITCHES, flag)},
    ),
    "Scheduler.add_engine": scheduler_entry(
        "add_engine", {"engine_id": 7, **ENGINE},
        {"engine_id": whole(0), **dict.fromkeys(COSTS, real(0, 1e9)), "capacity_tokens": whole(1, 2**40),
         "max_batch_size": whole(1, 2**31 - 1), "model": whole()},
        after=lambda made: made.remove_engine(7),
    ),
    "Scheduler.remove_engine": scheduler_entry(
        "remove_engine", {"engine_id": 1}, {"engine_id": whole(0, 1)},
        after=lambda made: made.add_engine(1, **ENGINE),
    ),
    "Scheduler.set_paused": scheduler_entry(
        "set_paused", {"engine_id": 0, "paused": True}, {"engine_id": whole(0, 1), "paused": flag}
    ),
    "Scheduler.set_slowdown": scheduler_entry(
        "set_slowdown", {"engine_id": 0, "slowdown": 2.0},
        {"engine_id": whole(0, 1), "slowdown": real(1e-4, 1e4, 0.0, 1e-5)},
    ),
    "Scheduler.set_cost": scheduler_entry(
        "set_cost", {"engine_id": 0, **COSTS},
        {"engine_id": whole(0, 1), **dict.fromkeys(COSTS, real(0, 1e9))},
    ),
    "Scheduler.submit": scheduler_entry(
        "submit", {"call_id": 5, "app_ran_us": 0, **CALL, **OBJECTIVE},
        {"call_id": whole(0), "app_id": whole(), "app_arrival_us": TIME, "now_us": TIME,
         "app_ran_us": whole(0, 2**60, none=True),
         "max_new_tokens": TOKEN_COUNT, "tenant": whole(none=True), **PROMPT_KINDS, **SCOPE_KINDS,
         **OBJECTIVE_KINDS},
        after=lambda made: made.cancel(5),
    ),
    "Scheduler.set_objective": scheduler_entry(
        "set_objective", {"call_id": 1, **OBJECTIVE}, {"call_id": whole(), **OBJECTIVE_KINDS}
    ),
    "Scheduler.cancel": scheduler_entry("cancel", {"call_id": 99}, {"call_id": whole()}),
    "Scheduler.set_tenant_weight": scheduler_entry(
        "set_tenant_weight", {"tenant": 3, "weight": 2.0}, {"tenant": whole(), "weight": real(1e-6, 1e6, 0.0)}
    ),
    "Scheduler.schedule": scheduler_entry("schedule", {"now_us": 0}, {"now_us": TIME}),
    "Scheduler.finish": scheduler_entry(
        "finish", {"call_id": 1, "now_us": 0, "context_id": 0, "num_tokens": 7},
        {"call_id": whole(1, 1), "now_us": TIME, "context_id": whole(0), "num_tokens": whole(0)}, after=again,
    ),
    "Scheduler.add_context": scheduler_entry(
        "add_context", {"engine_id": 0, "context_id": 8, **PROMPT, **SCOPE},
        {"engine_id": whole(0, 1), "context_id": whole(1), **PROMPT_KINDS, **SCOPE_KINDS},
        after=lambda made: made.forget_context(0, 8, 0),
    ),
    "Scheduler.forget_context": scheduler_entry(
        "forget_context", {"engine_id": 0, "context_id": 99, "remaining": 0},
        {"engine_id": whole(0, 1), "context_id": whole(), "remaining": whole(0)},
    ),
    "Scheduler.explain": scheduler_entry("explain", {"call_id": 1}, {"call_id": whole(1, 1)}),
    "Scheduler.candidates": scheduler_entry(
        "candidates", {"now_us": 0, "latency": False, "max_new_tokens": 4, **PROMPT, **SCOPE},
        {"now_us": TIME, "latency": flag, "max_new_tokens": TOKEN_COUNT, **PROMPT_KINDS, **SCOPE_KINDS},
    ),
    "Scheduler.engine_load": scheduler_entry("engine_load", {"engine_id": 0}, {"engine_id": whole(0, 1)}),
}  # fmt: skip


# The prefix index: call 1, which waits for variable 4, and context 1.


def index() -> _core.PrefixIndex:
    made = _core.PrefixIndex(KEY)
    made.add_call(1, 0, i32(1, 2, -1), i32(2, 3), variables=[4])
    made.add_context(1, 0, i32(1, 2, 3), i32(2, 3))
    return made


def index_entry(verb: str, arguments: dict[str, Any], kinds: dict[str, Kind], **ways: Any) -> Entry:
    def make() -> tuple[Callable[..., Any], dict[str, Any]]:
        made = index()
        call = getattr(made, verb)
        if "after" in ways:
            call = undone(call, lambda: ways["after"](made))
        return call, dict(arguments)

    return Entry(make, kinds)


OWNER = whole(1, 2**62 - 1)
INDEX = {
    "PrefixIndex.__init__": Entry(
        lambda: (_core.PrefixIndex, {"hash_key": KEY, "constant_hash": True}),
        {"hash_key": key, "constant_hash": flag},
    ),
    "PrefixIndex.add_call": index_entry(
        "add_call", {"call_id": 7, "variables": [], **PROMPT, **SCOPE},
        {"call_id": OWNER, "variables": integers, **PROMPT_KINDS, **SCOPE_KINDS},
        after=lambda made: made.remove_call(7),
    ),
    "PrefixIndex.add_context": index_entry(
        "add_context", {"context_id": 7, **PROMPT, **SCOPE},
        {"context_id": OWNER, **PROMPT_KINDS, **SCOPE_KINDS}, after=lambda made: made.remove_context(7),
    ),
    "PrefixIndex.remove_call": index_entry(
        "remove_call", {"call_id": 1}, {"call_id": whole(1, 1)},
        after=lambda made: made.add_call(1, 0, i32(1), i32(1)),
    ),
    "PrefixIndex.remove_context": index_entry(
        "remove_context", {"context_id": 1}, {"context_id": whole(1, 1)},
        after=lambda made: made.add_context(1, 0, i32(1), i32(1)),
    ),
    "PrefixIndex.shorten_context": index_entry(
        "shorten_context", {"context_id": 1, "length": 2}, {"context_id": whole(1, 1), "length": whole(0)}
    ),
    "PrefixIndex.set_variable": index_entry(
        "set_variable", {"variable_id": 4, "token_ids": i32(3, 4)},
        {"variable_id": whole(0), "token_ids": TOKENS},
    ),
    "PrefixIndex.match": index_entry(
        "match", {"variables": [], "max_owners": 16, **PROMPT, **SCOPE},
        {"variables": integers, "max_owners": whole(1), **PROMPT_KINDS, **SCOPE_KINDS},
    ),
}  # fmt: skip
