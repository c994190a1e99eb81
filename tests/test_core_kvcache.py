"""The Python side of the KV cache refuses wrong arguments by name and value, and changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kv_contents import Cache, i32, i64
from parrot._core import ContextTree


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache(num_blocks=64)
    yield cache
    cache.check()


def int_max(*shape: int) -> npt.NDArray[np.int32]:
    return np.full(shape, np.iinfo(np.int32).max, np.int32)


def read_only(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    array.flags.writeable = False
    return array


INVALID_CALLS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("open", (1, 0, i32([1]), 1), ValueError, "context_id 1 is in use"),
    ("open", (0, 0, i32([1]), 1), ValueError, "context_id must be > 0, got 0"),
    ("open", (9, 0, i32([1]), 2), ValueError, r"max_prefix must be in .*\[0, 1\], got 2"),
    ("open", (9, 0, i32([1]), -1), ValueError, "max_prefix.*got -1"),
    ("open", (9, 0, i32([1, -5]), 0), ValueError, "token_ids must be >= 0, got -5 at index 1"),
    (
        "open",
        (9, 0, np.array([1.0]), 0),
        ValueError,
        r"token_ids: expected .*int32.*got dtype float64, shape",
    ),
    ("open", (9, 0, [1], 0), ValueError, "token_ids: expected .*list"),
    ("open", (9, 0, i32([1, 2, 3])[::2], 0), ValueError, r"token_ids: .*strides \(8,\)"),
    ("open", (9, 0, i32([1]).reshape(1, 1), 0), ValueError, r"token_ids: .*shape \(1, 1\)"),
    ("fork", (1, 2, 0), ValueError, "context_id 1 is in use"),
    ("fork", (9, 77, 0), KeyError, "parent_context_id: no context has the id 77"),
    ("fork", (9, 1, 21), ValueError, r"length must be in \[0, 20\].*context 1, got 21"),
    ("fork", (9, 1, -1), ValueError, "got -1"),
    ("fork", (9, 1, 2**40), ValueError, "got 1099511627776"),
    ("pending_prefix", (0, i64(1)), ValueError, "token_ids: .*dtype int64"),
    ("reserve", (i64(1, 1), i32([1, 1]), i32([1, 2]), int_max(2)), ValueError, "context_ids has 1 twice"),
    ("reserve", (i64(77), i32([1]), i32([1]), int_max(1)), KeyError, "context_ids: no context has the id 77"),
    ("reserve", (i64(2), i32([1]), i32([1]), int_max(1)), ValueError, "context_ids 2 is cached, not held"),
    ("reserve", (i64(3), i32([1]), i32([1]), int_max(1)), ValueError, "3 has an open reservation already"),
    (
        "reserve",
        (i64(1), i32([0]), i32([]), int_max(0)),
        ValueError,
        "counts must be > 0, got 0 for context_id 1",
    ),
    (
        "reserve",
        (i64(1), i32([1, 1]), i32([1, 1]), int_max(2)),
        ValueError,
        "counts must have 1 entries.*got 2",
    ),
    ("reserve", (i64(1), i32([2]), i32([1]), int_max(1)), ValueError, r"sum\(counts\) = 2 entries, got 1"),
    ("reserve", (i64(1), i32([1]), i32([1]), int_max(2)), ValueError, "slots must have .* 1 entries, got 2"),
    ("reserve", (i64(1), i32([1]), i32([-1]), int_max(1)), ValueError, "got -1 at index 0"),
    (
        "reserve",
        (i64(1), i32([1]), i32([1]), read_only(int_max(1))),
        ValueError,
        "slots: the array is read-only",
    ),
    (
        "reserve",
        (i32([1]), i32([1]), i32([1]), int_max(1)),
        ValueError,
        "context_ids: expected .*int64.*int32",
    ),
    ("reserve", (i64(1), i32([2**31 - 1]), i32([1]), int_max(1)), ValueError, "= 2147483647 entries, got 1"),
    ("commit", (i64(1),), ValueError, "context_ids: 1 has no open reservation"),
    ("commit", (i64(3, 3),), ValueError, "context_ids has 3 twice"),
    ("set_last_tokens", (i64(1), i32([5])), ValueError, "context_ids: 1 has no open reservation"),
    ("set_last_tokens", (i64(3), i32([5, 6])), ValueError, "token_ids must have 1 entries.*got 2"),
    ("set_last_tokens", (i64(3), i32([-5])), ValueError, "token_ids must be >= 0, got -5"),
    ("rollback", (i64(3, 1),), ValueError, "context_ids: 1 has no open reservation"),
    ("truncate", (1, 21), ValueError, r"length must be in \[0, 20\].*got 21"),
    ("truncate", (3, 0), ValueError, "context_id 3 has an open reservation"),
    ("truncate", (2, 0), ValueError, "context_id 2 is cached"),
    ("set_uses", (i64(1), i32([1]), i32([1]), i32([1])), ValueError, "context_ids 1 is held, not cached"),
    ("set_uses", (i64(77), i32([1]), i32([1]), i32([1])), KeyError, "context_ids: no context has the id 77"),
    ("set_uses", (i64(2, 2), *[i32([1, 1])] * 3), ValueError, "context_ids has 2 twice"),
    (
        "set_uses",
        (i64(2), i32([1, 1]), i32([1]), i32([1])),
        ValueError,
        "prefix_lengths must have 1 entries.*got 2",
    ),
    (
        "set_uses",
        (i64(2), i32([1]), i32([-1]), i32([1])),
        ValueError,
        "remaining_uses must be >= 0, got -1 for context_id 2",
    ),
    ("set_uses", (i64(2), i32([1]), i32([1]), i64(1)), ValueError, "steps_to_next_use: .*dtype int64"),
    ("release", (2,), ValueError, "context_id 2 is cached, not held"),
    ("release", (77,), KeyError, "77"),
    ("free", (77,), KeyError, "77"),
    ("tokens", (77,), KeyError, "77"),
    ("lengths", (i64(1, 2), int_max(3)), ValueError, "out must have 2 entries.*got 3"),
    ("lengths", (i64(1, 77), int_max(2)), KeyError, "77"),
    ("block_tables", (i64(1), int_max(1, 1)), ValueError, "rows of 1 blocks, but context 1 has 2"),
    ("block_tables", (i64(1), int_max(2, 2)), ValueError, "out must have 1 rows.*got 4 entries in rows of 2"),
    ("block_tables", (i64(1), int_max(2)), ValueError, r"out: .*2 dimension\(s\); got .*shape \(2,\)"),
    ("block_tables", (i64(1), int_max(4, 4).T[:1]), ValueError, "out: expected a C-contiguous array"),
]


@pytest.mark.parametrize(("verb", "arguments", "error", "match"), INVALID_CALLS)
def test_a_wrong_argument_is_named_with_its_value_and_changes_nothing(
    cache: Cache, verb: str, arguments: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    cache.prefill(1, range(20))
    cache.prefill(2, range(20, 40))
    cache.tree.release(2)
    cache.open(3, [])
    cache.reserve({3: [5]})
    before = [cache.tree.num_free_blocks, cache.tree.num_held_blocks, cache.tree.counters()]
    with pytest.raises(error, match=match):
        getattr(cache.tree, verb)(*arguments)
    assert [cache.tree.num_free_blocks, cache.tree.num_held_blocks, cache.tree.counters()] == before


def test_who_looks_while_another_thread_works_finds_nothing_broken() -> None:
    tree, tokens, slots = ContextTree(4_096), i32(range(20)), int_max(20)
    errors: list[Exception] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                tree.check_invariants()
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for context_id in range(1, 8_000):  # most of them cached, so that a look takes long
        tree.open(context_id, context_id, i32([]), 0)
        tree.reserve(i64(context_id), i32([20]), tokens, slots)
        tree.commit(i64(context_id))
        tree.release(context_id)
    done.set()
    thread.join()
    assert errors == []


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "match"),
    [(0, 16, "num_blocks.*got 0"), (1, 0, "block_size.*got 0"), (2**28, 16, r"134217727\].*got 268435456")],
)
def test_pool_sizes_out_of_range_are_refused(num_blocks: int, block_size: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ContextTree(num_blocks, block_size)
