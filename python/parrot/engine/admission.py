"""Which waiting calls start: in application order, when their blocks fit and no one else is computing their
prefix."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from .._core import ContextTree
from ..errors import PromptTooLong
from ..wire import CallId, Ids
from .batch import BLOCK_SIZE
from .call import EngineCall

HOLD_TOKENS = 32  # waiting a few steps is cheaper than computing this many tokens twice
_LOOK_AHEAD = 256  # waiting calls considered in one step


def remove_in_order(calls: list[EngineCall], call: EngineCall) -> bool:
    """Take the call out of a list that is in the order of applications; False if it is not there."""
    at = bisect_left(calls, call.order, key=attrgetter("order"))
    if at == len(calls) or calls[at] is not call:
        return False
    del calls[at]
    return True


def computing(calls: Iterable[EngineCall]) -> list[EngineCall]:
    """Those of which others may wait for what they are about to compute."""
    return [call for call in calls if call.num_remaining >= HOLD_TOKENS]


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold this many tokens of one context."""
    return -(-num_tokens // BLOCK_SIZE)


def _missing_blocks(call: EngineCall) -> int:
    """Blocks that a call has not taken yet for the ids it has."""
    return num_blocks_for(call.ids.length) - num_blocks_for(call.num_computed)


def common_prefix(first: Ids, second: Ids) -> int:
    """Length of the longest common prefix."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def common_cacheable(first: EngineCall, second: EngineCall) -> int:
    """Length of the longest prefix that two calls have in the same domains: one may use the other's KV."""
    length = common_prefix(first.ids.view(), second.ids.view())
    if (first.domain, first.public_len) == (second.domain, second.public_len):
        return length
    return min(length, first.public_len, second.public_len)


def check_fits(call: EngineCall, max_len: int, num_blocks: int) -> None:
    """Raise :class:`PromptTooLong` for a call that could not run even with the engine to itself."""
    num_tokens = call.num_fill_ids + call.max_generated
    if num_tokens > max_len:
        raise PromptTooLong(
            f"a prompt of {call.num_fill_ids} tokens and max_tokens of {call.max_generated} "
            f"make {num_tokens}, above the model's {max_len}",
            param="max_tokens" if call.num_fill_ids < max_len else "prompt",
        )
    if num_blocks_for(num_tokens) > num_blocks:
        raise too_long(call, num_tokens, num_blocks)


def too_long(call: EngineCall, num_tokens: int, num_blocks: int) -> PromptTooLong:
    """The error for a call that needs more blocks than there are."""
    return PromptTooLong(
        f"a prompt of {call.num_fill_ids} tokens and max_tokens of {call.max_generated} need "
        f"{num_blocks_for(num_tokens)} blocks of {BLOCK_SIZE} tokens, above the {num_blocks} of this engine",
        param="prompt",
    )


class WaitingQueue:
    """Calls that wait for blocks or for a place in the batch, the earliest application first."""

    def __init__(self, tree: ContextTree) -> None:
        self._tree = tree
        self._calls: list[EngineCall] = []
        self._no_room: tuple[CallId, int] | None = None  # the call last found not to fit, and its room then

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[EngineCall]:
        return iter(self._calls)

    def add(self, call: EngineCall) -> None:
        """Queue a call, new or preempted, where its application's arrival puts it."""
        insort(self._calls, call, key=attrgetter("order"))

    def start_anew(self, running: Iterable[EngineCall]) -> None:
        """The tree was reset: these calls wait too, and nothing is there of any call."""
        for call in running:
            self.add(call)
        for call in self._calls:
            call.has_context, call.num_computed = False, 0

    def remove(self, call: EngineCall) -> None:
        """Drop a call if it is here."""
        remove_in_order(self._calls, call)

    def admit(
        self, running: Sequence[EngineCall], max_calls: int, max_tokens: int
    ) -> list[tuple[EngineCall, int]]:
        """Take out calls that start now, each with the length of its cached prefix; their contexts are open.

        At most ``max_calls``, and no more once they bring ``max_tokens`` tokens to compute. The first call
        whose blocks do not fit ends the pass, so that it cannot be starved by smaller ones behind it.
        """
        if not self._calls or max_calls <= 0 or max_tokens <= 0:
            return []
        active = computing(running)
        num_active, promised = len(running), sum(map(_missing_blocks, running))
        admitted: list[tuple[EngineCall, int]] = []
        for call in self._calls[:_LOOK_AHEAD]:
            if len(admitted) >= max_calls or max_tokens <= 0:
                break
            if self.is_being_computed(call, active):
                continue
            prefix_len = self._open(call, num_active, promised)
            if prefix_len is None:
                break
            call.num_computed = prefix_len
            num_active += 1
            active += computing((call,))
            promised += _missing_blocks(call)
            admitted.append((call, prefix_len))
            max_tokens -= len(call.ids) - prefix_len
        if admitted:
            taken = {call.call_id for call, _ in admitted}
            self._calls = [call for call in self._calls if call.call_id not in taken]
        return admitted

    def is_being_computed(self, call: EngineCall, active: Sequence[EngineCall]) -> bool:
        """One of :func:`computing` calls is about to compute at least HOLD_TOKENS of this prompt that are not
        cached yet."""
        ids = call.ids.view(0, call.max_cached)
        sharers = [other for other in active if other.domain == call.domain or call.public_len]
        if len(ids) < HOLD_TOKENS or not sharers:
            return False
        cached = self._tree.pending_prefix(call.domain, ids, min(call.public_len, len(ids)))
        wanted = (min(common_cacheable(call, other), len(ids)) for other in sharers)
        return any(length - cached >= HOLD_TOKENS for length in wanted)

    def _open(self, call: EngineCall, num_active: int, promised: int) -> int | None:
        """Open the context if its blocks fit; the length of its cached prefix, or None.

        Half-open token ranges, and who pays for their blocks:
            [0, prefix)                shared with the cache, held from now on, freed by whoever is last
            [prefix, len(ids))         this call's own, taken step by step
            the same of active calls   what they have not taken yet: ``promised`` blocks
            one block per active call  watermark: each may need a next one soon
        """
        ids = call.ids.view()
        max_prefix = call.max_cached
        cached = self._tree.pending_prefix(call.domain, ids[:max_prefix], min(call.public_len, max_prefix))
        wanted = num_blocks_for(len(ids)) - cached // BLOCK_SIZE + promised + num_active
        room = self._num_available() - wanted
        if num_active and (room < 0 or self._no_room == (call.call_id, room)):
            return None
        if call.has_context:  # preempted: what it left in the cache is found by content
            self._tree.free(call.context_id)
        prefix_len = self._tree.open(call.context_id, call.domain, ids, max_prefix, call.public_len)
        call.has_context = True
        if num_active and wanted > self._num_available():  # the prefix itself is no longer evictable
            self._tree.release(call.context_id)
            self._no_room = (call.call_id, room)
            return None
        return prefix_len

    def _num_available(self) -> int:
        return self._tree.num_free_blocks + self._tree.num_evictable_blocks
