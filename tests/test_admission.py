"""The waiting queue: order, the hold for a prefix under way, and blocks."""

from __future__ import annotations

import numpy as np
import pytest

from parrot._core import ContextTree
from parrot.engine.admission import WaitingQueue, check_fits, common_prefix, num_blocks_for
from parrot.engine.call import EngineCall
from parrot.errors import PromptTooLong
from parrot.wire import CallId, ContextId, Dispatch, Fill, Generate, Sampling, pack_ids


def call_of(
    number: int, prompt: list[int], *, domain: int = 1, arrival: int = 0, public_len: int = 0
) -> EngineCall:
    context_id = ContextId(number)
    fill = Fill(pack_ids(prompt), context_id, public_len=public_len)
    verbs = (fill, Generate(Sampling(max_tokens=10), context_id))
    call = EngineCall(Dispatch(CallId(number), domain, arrival, "LATENCY", verbs), received_us=1)
    call.advance(lambda _ids: "")
    return call


def admit(
    queue: WaitingQueue, running: list[EngineCall], max_calls: int = 8, max_tokens: int = 10_000
) -> list[int]:
    admitted = queue.admit(running, max_calls, max_tokens)
    running += [call for call, _ in admitted]
    return [int(call.call_id) for call, _ in admitted]


def compute(tree: ContextTree, call: EngineCall, count: int) -> None:
    """What a step does to the tree."""
    ids = np.ascontiguousarray(call.ids.view(call.num_computed, call.num_computed + count))
    context_ids = np.array([call.context_id], dtype=np.int64)
    tree.reserve(context_ids, np.array([count], dtype=np.int32), ids, np.empty(count, dtype=np.int32))
    tree.commit(context_ids)
    call.num_computed += count


def test_common_prefix() -> None:
    a, b = np.array([1, 2, 3], dtype=np.int32), np.array([1, 2, 4, 5], dtype=np.int32)
    assert [common_prefix(a, b), common_prefix(a, a), common_prefix(a[:0], b)] == [2, 3, 0]


def test_blocks_are_rounded_up() -> None:
    assert [num_blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_earlier_applications_go_first_then_earlier_calls() -> None:
    queue = WaitingQueue(ContextTree(100))
    for number, arrival in ((3, 50), (1, 50), (2, 10)):
        queue.add(call_of(number, [number] * 5, arrival=arrival))
    assert admit(queue, [], max_calls=2) == [2, 1]
    assert [call.call_id for call in queue] == [3]


def test_no_more_calls_than_the_token_budget_wants() -> None:
    queue = WaitingQueue(ContextTree(100))
    for number in (1, 2, 3):
        queue.add(call_of(number, [number] * 40))
    assert admit(queue, [], max_tokens=60) == [1, 2]


def test_a_call_waits_for_a_prefix_under_way_and_lets_others_pass() -> None:
    tree, running = ContextTree(100), list[EngineCall]()
    queue = WaitingQueue(tree)
    shared = list(range(100, 180))
    queue.add(call_of(1, [*shared, 1]))
    queue.add(call_of(2, [*shared, 2]))
    queue.add(call_of(3, [*shared, 3], domain=9))
    queue.add(call_of(4, [*shared[:31], 4]))
    assert admit(queue, running) == [1, 3, 4]
    compute(tree, running[0], 48)
    assert admit(queue, running) == []
    compute(tree, running[0], 1)  # 31 to come: not worth the wait
    assert admit(queue, running) == [2]
    assert running[-1].num_computed == 49


def test_a_call_waits_for_published_text_that_another_tenant_computes_and_for_no_more() -> None:
    tree, running = ContextTree(100), list[EngineCall]()
    queue = WaitingQueue(tree)
    shared = list(range(100, 220))
    queue.add(call_of(1, [*shared, 1], domain=1, public_len=60))
    queue.add(call_of(2, [*shared, 2], domain=2, public_len=60))
    queue.add(call_of(3, [*shared, 3], domain=3))  # says of the same text that it is its own
    queue.add(call_of(4, [*shared, 4], domain=1, public_len=60))
    assert admit(queue, running) == [1, 3]
    compute(tree, running[0], 60)
    assert admit(queue, running) == [2]
    assert running[-1].num_computed == 60
    compute(tree, running[0], 60)
    assert admit(queue, running) == [4]
    assert running[-1].num_computed == 120


def test_the_first_call_without_room_keeps_those_behind_it_back() -> None:
    tree, running = ContextTree(6), list[EngineCall]()
    queue = WaitingQueue(tree)
    queue.add(call_of(1, [1] * 40))
    queue.add(call_of(2, [2] * 60))
    queue.add(call_of(3, [3] * 4))
    assert admit(queue, running) == [1]
    assert admit(queue, running) == []
    compute(tree, running[0], 40)
    tree.release(1)
    assert admit(queue, []) == [2, 3]


def test_a_call_without_room_is_not_looked_up_again_until_something_changes() -> None:
    tree, running = ContextTree(6), list[EngineCall]()
    queue = WaitingQueue(tree)
    for number, length in ((1, 33), (2, 32)):
        queue.add(call_of(number, [number] * length))
        assert admit(queue, running) == [number]
        compute(tree, running[-1], length)
    tree.release(1)
    del running[0]
    # Its prefix is evictable, and so counts as room, until it is opened.
    queue.add(call_of(3, [1] * 32 + [3] * 30))
    for _ in range(5):
        assert admit(queue, running) == []
    assert tree.counters()["forks"] == 1
    tree.release(2)
    assert admit(queue, []) == [3]


def test_removed_calls_are_gone() -> None:
    queue = WaitingQueue(ContextTree(100))
    calls = [call_of(number, [number]) for number in range(1, 6)]
    for number in (4, 1, 5, 2, 3):
        queue.add(calls[number - 1])
    for number in (3, 1, 5):
        queue.remove(calls[number - 1])
        queue.remove(calls[number - 1])  # gone, with others behind it or not
    queue.remove(call_of(4, [4]))  # another one of that name
    assert list(queue) == [calls[1], calls[3]]


@pytest.mark.parametrize(
    ("max_len", "num_blocks", "param"), [(45, 100, "max_tokens"), (40, 100, "prompt"), (100, 3, "prompt")]
)
def test_what_can_never_fit_is_refused_with_the_field_at_fault(
    max_len: int, num_blocks: int, param: str
) -> None:
    with pytest.raises(PromptTooLong) as caught:
        check_fits(call_of(1, [1] * 40), max_len, num_blocks)
    assert caught.value.param == param


def test_what_just_fits_is_not_refused() -> None:
    check_fits(call_of(1, [1] * 40), max_len=50, num_blocks=4)
