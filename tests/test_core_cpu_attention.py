"""The native CPU attention against attention written out in float64, in every instruction set of this CPU."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention_case import BLOCK, Case, Tree, to_bfloat16, view, widened

from parrot import _core

TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3}
HEADS = {"mha": (4, 4), "gqa": (6, 2), "gqa-3": (9, 3), "mqa": (8, 1)}


@pytest.fixture(params=["scalar", "avx2", "avx512", "avx512bf16"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in _core.cpu_isas():
        pytest.skip(f"this CPU has no {request.param}")
    _core.set_cpu_isa(request.param)
    yield request.param
    _core.set_cpu_isa("")


def decodes(*lengths: int) -> Tree:
    return Tree(list(lengths), [1] * len(lengths))


def sharing(prefix: int, own: list[int], rows: int = 1) -> Tree:
    """Sequences with ``prefix`` common tokens."""
    parents = [(-1, 0)] + [(0, prefix)] * (len(own) - 1)
    return Tree([prefix + n for n in own], [rows] * len(own), parents)


# Two groups of unequal size and depth under one root, the second group with a group of its own.
DEEP = Tree(
    lengths=[200, 210, 181, 345, 352, 339, 500, 97, 33],
    rows=[1] * 9,
    parents=[(-1, 0), (0, 176), (0, 160), (0, 96), (3, 320), (3, 256), (4, 336), (0, 96), (-1, 0)],
)
STEPS = {
    "decode": decodes(1, 15, 16, 17, 90),
    "decode-long": decodes(1000),
    "shared": sharing(256, [3, 20, 1, 64, 17, 16, 130]),
    "deep": DEEP,
    "first-chunk": Tree([70, 2, 33], [70, 2, 33]),
    "later-chunk": Tree([50, 333, 48], [13, 32, 16]),
    "long-chunk": Tree([1100], [40]),
    "mixed": Tree([340, 25, 310, 60, 305], [1, 25, 1, 9, 1], [(-1, 0), (-1, 0), (0, 288), (-1, 0), (2, 288)]),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_attention_written_out(isa: str, dtype: str, heads: tuple[int, int], head_dim: int) -> None:
    for i, (name, tree) in enumerate(STEPS.items()):
        case = Case(tree, *heads, head_dim, dtype)
        threads = (1, 2, 5)[(i + head_dim // 64) % 3]
        assert case.error(case.run(num_threads=threads)) < TOLERANCE[dtype], (name, threads)


@pytest.mark.parametrize("head_dim", [16, 48, 80, 96, 256, 512])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_other_head_sizes(isa: str, dtype: str, head_dim: int) -> None:
    case = Case(STEPS["mixed"], 4, 2, head_dim, dtype)
    assert case.error(case.run(num_threads=2)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_suffixes_that_end_at_every_offset_of_a_page(isa: str, dtype: str) -> None:
    case = Case(sharing(128, list(range(1, 2 * BLOCK + 2))), 4, 2, 64, dtype)
    assert case.error(case.run(num_threads=2)) < TOLERANCE[dtype]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 127, 129, 255, 256, 257, 300, 643])
def test_a_sequence_that_decodes_alone_is_cut_for_all_threads(length: int, threads: int) -> None:
    case = Case(decodes(length), 6, 2, 64, "bfloat16")
    parts = min(threads, max(1, length // 128))
    assert case.attention(num_threads=threads).num_items == parts
    assert case.error(case.run(num_threads=threads)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_chunks_of_every_small_size_over_every_offset(isa: str, dtype: str) -> None:
    chunks = [(before, rows) for before in range(BLOCK + 2) for rows in range(1, BLOCK + 3)]
    case = Case(Tree([a + b for a, b in chunks], [b for _, b in chunks]), 3, 1, 64, dtype)
    output, expected = widened(case.run(num_threads=2)), case.expected()
    for i, chunk in enumerate(chunks):
        rows = slice(case.query_start[i], case.query_start[i + 1])
        error = np.linalg.norm(output[rows] - expected[rows]) / np.linalg.norm(expected[rows])
        assert error < TOLERANCE[dtype], chunk


@pytest.mark.parametrize("count", [1, 2, 3, 31, 33, 64, 256])
def test_any_number_of_requests_shares(isa: str, count: int) -> None:
    case = Case(sharing(192, [1 + i % 40 for i in range(count)]), 3, 1, 64, "bfloat16")
    assert case.error(case.run(num_threads=2)) < TOLERANCE["bfloat16"]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Sequences that each begin with blocks of an earlier one; some with several rows."""
    tree = Tree([], [])
    for i in range(draw(st.integers(1, 14))):
        parent = draw(st.integers(-1, i - 1))
        full_blocks = tree.lengths[parent] // BLOCK if parent >= 0 else 0
        shared = BLOCK * draw(st.integers(0, full_blocks))
        own = draw(st.integers(1, 150))
        tree.lengths.append(shared + own)
        tree.rows.append(draw(st.one_of(st.just(1), st.integers(1, own))))
        tree.parents.append((parent, shared) if shared else (-1, 0))
    return tree


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    trees(),
    st.sampled_from(list(HEADS.values())),
    st.sampled_from([16, 64]),
    st.sampled_from(list(TOLERANCE)),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from(_core.cpu_isas()),
)
def test_random_trees(
    tree: Tree, heads: tuple[int, int], head_dim: int, dtype: str, threads: int, share: bool, name: str
) -> None:
    _core.set_cpu_isa(name)
    try:
        case = Case(tree, *heads, head_dim, dtype, seed=len(tree.lengths))
        assert case.error(case.run(num_threads=threads, share=share)) < TOLERANCE[dtype]
    finally:
        _core.set_cpu_isa("")


def test_one_plan_gives_the_same_bits_every_time() -> None:
    case = Case(DEEP, 9, 3, 64, "float32")
    attention = case.attention(num_threads=4)
    assert attention.num_partials > 0
    outputs = [np.zeros_like(case.query) for _ in range(20)]
    for output in outputs:
        case.call(attention, output)
    assert all(np.array_equal(output, outputs[0]) for output in outputs)


def test_a_plan_is_replaced_by_the_next() -> None:
    large, small = Case(DEEP, 4, 2, 64, "float32"), Case(STEPS["mixed"], 4, 2, 64, "float32", seed=1)
    attention = large.attention(num_threads=2)
    for case in (small, large, small):
        attention.plan(case.query_start, case.seq_lens, case.tables, case.num_blocks, num_threads=2)
        output = np.full_like(case.query, np.nan)
        case.call(attention, output)
        assert case.error(output) < 1e-5


@pytest.mark.parametrize(("own", "parts"), [(75, 2), (3, 2)])
def test_a_shared_prefix_has_no_more_parts_than_keep_the_threads_busy(own: int, parts: int) -> None:
    case = Case(sharing(992, [own] * 16), 9, 3, 64, "bfloat16")
    assert case.attention(num_threads=2).num_items == parts + 16
    assert case.error(case.run(num_threads=2)) < TOLERANCE["bfloat16"]


def test_a_shared_prefix_is_one_item_for_all_who_share_it() -> None:
    case = Case(sharing(1024, [16] * 16), 3, 1, 64, "bfloat16")
    shared = case.attention(num_threads=1)
    alone = case.attention(num_threads=1, share=False)
    assert shared.num_items == 16 + 1
    assert alone.num_items == 16
    assert (shared.num_sharing, alone.num_sharing) == (16, 0)


def test_large_scores_do_not_overflow(isa: str) -> None:
    case = Case(STEPS["mixed"], 4, 2, 64, "float32")
    case.query *= 300  # before the reference is computed
    assert case.error(case.run(num_threads=2)) < 1e-4


@pytest.mark.parametrize("growth", [1.15, 1.6])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scores_may_rise_from_tile_to_tile(isa: str, dtype: str, growth: float) -> None:
    """By less than what a row's reference lets pass, which adds up, and by more."""
    case = Case(sharing(512, [3, 20, 70]), 6, 2, 64, dtype)
    keys = widened(case.keys)
    for i, page in enumerate(case.tables[0, : 512 // BLOCK]):
        keys[page] *= growth ** (i * BLOCK // 64)
    case.keys = to_bfloat16(keys) if dtype == "bfloat16" else keys.astype(np.float32)
    for share in (True, False):
        assert case.error(case.run(num_threads=2, share=share)) < max(TOLERANCE[dtype], 5e-5)


def test_a_nan_in_the_query_stays_in_its_row(isa: str) -> None:
    case = Case(sharing(128, [5] * 4), 4, 2, 64, "float32")
    case.query.view(np.uint32)[1, 2, 7] = 0x7FC00001  # with more bits set than that of an operation
    for share in (True, False):
        output = case.run(num_threads=2, share=share)
        assert np.isnan(output[1, 2]).all()
        assert np.isnan(output).sum() == 64


def test_rows_may_lie_within_larger_ones() -> None:
    case = Case(STEPS["mixed"], 4, 2, 64, "float32")
    expected = case.run(num_threads=2)
    rows = len(case.query)
    fused = np.full((rows, 4 * 64 + 40), np.nan, dtype=np.float32)
    fused[:, : 4 * 64] = case.query.reshape(rows, -1)
    output = np.full((rows, 4 * 64 + 16), 7, dtype=np.float32)
    parts = [array[:, : 4 * 64].reshape(rows, 4, 64) for array in (fused, output)]
    # numpy copies on such a reshape; the views are described by hand.
    views = [
        _core.TensorView(a.ctypes.data, p.shape, (a.shape[1], 64, 1))
        for a, p in zip((fused, output), parts, strict=True)
    ]
    case.call_with(case.attention(num_threads=2), *views)
    assert np.array_equal(output[:, : 4 * 64].reshape(rows, 4, 64), expected)
    assert (output[:, 4 * 64 :] == 7).all()


def test_a_step_without_sequences_does_nothing() -> None:
    attention = _core.CpuAttention(4, 2, 64, "float32")
    attention.plan(np.zeros(1, dtype=np.int32), *_EMPTY, 1)
    none, cache = np.zeros((0, 4, 64), dtype=np.float32), np.zeros((1, BLOCK, 2, 64), dtype=np.float32)
    attention.run(view(none), view(cache), view(cache), view(none), 0.1)
    assert not cache.any()


def test_engines_on_several_threads_do_not_mix() -> None:
    cases = [Case(DEEP, 6, 2, 64, "float32", seed=i) for i in range(4)]
    errors = []

    def engine(case: Case) -> None:
        expected = case.expected()
        for _ in range(30):
            errors.append(np.linalg.norm(case.run(num_threads=3) - expected) / np.linalg.norm(expected))

    threads = [threading.Thread(target=engine, args=[case]) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 120
    assert max(errors) < 1e-5


def test_a_plan_does_not_change_between_the_checks_of_a_run_and_its_end() -> None:
    small, large = Case(decodes(16), 4, 4, 64, "float32"), Case(decodes(*[16] * 256), 4, 4, 64, "float32")
    attention = small.attention(num_threads=1)
    rows = np.zeros((3, *small.query.shape), dtype=np.float32)
    begun, num_runs, num_plans = time.monotonic(), 0, 0

    def goes_on() -> bool:
        """For a second, and until a busy machine has done some of both."""
        took = time.monotonic() - begun
        return took < 1 or (took < 60 and min(num_runs, num_plans) <= 10)

    def run() -> None:
        nonlocal num_runs
        while goes_on():
            with contextlib.suppress(RuntimeError, ValueError):  # in use, or the plan is the large one
                small.call(attention, rows[1])
                num_runs += 1

    with ThreadPoolExecutor() as pool:
        threads = [pool.submit(run) for _ in range(3)]
        while goes_on():
            for case in (small, large):
                with contextlib.suppress(RuntimeError):
                    attention.plan(case.query_start, case.seq_lens, case.tables, case.num_blocks)
                    num_plans += 1
                time.sleep(1e-4 * (num_plans % 3))  # a run begins, and is under way at the next plan
    assert all(thread.exception() is None for thread in threads)
    assert min(num_runs, num_plans) > 10
    assert not rows[[0, 2]].any()
    assert small.error(rows[1]) < 1e-5


def test_a_sequence_of_more_tokens_than_positions_can_count_is_refused() -> None:
    attention = _core.CpuAttention(4, 2, 16, "float32")
    table = np.zeros((1, 2**26 + 1), dtype=np.int32)
    for rows, length in ((1, 2**30 + 1), (2, 2**30 + 16)):
        with pytest.raises(ValueError, match=rf"seq_lens\[0\] = {length} is outside \[{rows}, 1073741824\]"):
            attention.plan(np.array([0, rows], np.int32), np.array([length], np.int32), table, 1)


SHAPES = [
    ((65_537, 1, 64, "float32"), "num_heads = 65537 is more than 65536"),
    ((0, 1, 64, "float32"), "num_heads = 0 is no positive multiple of num_kv_heads = 1"),
    ((4, 3, 64, "float32"), "num_heads = 4 is no positive multiple of num_kv_heads = 3"),
    ((4, 0, 64, "float32"), "num_kv_heads = 0"),
    ((4, 2, 24, "float32"), r"head_dim = 24 is no multiple of 16 in \[16, 512\]"),
    ((4, 2, 1024, "float32"), "head_dim = 1024"),
    ((4, 2, 64, "float16"), 'dtype = "float16" is neither'),
]


@pytest.mark.parametrize(("shape", "message"), SHAPES)
def test_a_wrong_model_shape_is_named(shape: tuple[int, int, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.CpuAttention(*shape)


PLANS = [
    ({"query_start": [0]}, "query_start has 1 elements for 2 sequences, expected 3"),
    ({"query_start": [1, 2, 3]}, r"query_start\[0\] = 1, expected 0"),
    ({"query_start": [0, 1, 1]}, r"query_start\[2\] = 1, expected more than query_start\[1\] = 1"),
    ({"query_start": [0, 1, 42]}, r"seq_lens\[1\] = 40 is outside \[41, 48\]"),
    ({"seq_lens": [17, 0]}, r"seq_lens\[1\] = 0 is outside \[1, 48\]"),
    ({"seq_lens": [49, 40]}, r"seq_lens\[0\] = 49 is outside \[1, 48\]"),
    ({"seq_lens": [17]}, "block_tables has 2 rows for 1 sequences"),
    ({"block_tables": [[0, 1, 9], [0, -1, 3]]}, r"block_tables\[1, 1\] = -1 is outside \[0, 5\)"),
    ({"block_tables": [[0, 5, 9], [0, 2, 3]]}, r"block_tables\[0, 1\] = 5 is outside \[0, 5\)"),
    ({"block_tables": [0, 5, 9]}, "block_tables has 1 axes, expected 2"),
    ({"num_blocks": 0}, "num_blocks = 0 is less than 1"),
    ({"num_threads": 1025}, r"num_threads = 1025 is outside \[0, 1024\]"),
]


@pytest.mark.parametrize(("wrong", "message"), PLANS)
def test_a_wrong_plan_is_named(wrong: dict[str, object], message: str) -> None:
    given_step = {
        "query_start": [0, 1, 2],
        "seq_lens": [17, 40],
        "block_tables": [[0, 1, 9], [0, 2, 3]],
        "num_blocks": 5,
        "num_threads": 1,
    } | wrong
    arrays = {k: np.array(v, dtype=np.int32) if isinstance(v, list) else v for k, v in given_step.items()}
    attention = _core.CpuAttention(4, 2, 64, "float32")
    with pytest.raises(ValueError, match=message):
        attention.plan(**arrays)  # type: ignore[arg-type]


def test_a_refused_plan_leaves_none() -> None:
    attention, views = _planned()
    with pytest.raises(ValueError, match="query_start"):
        attention.plan(np.array([1], dtype=np.int32), *_EMPTY, 1)
    with pytest.raises(RuntimeError, match="no plan"):
        attention.run(**views, scale=0.1)


def test_other_integers_are_refused() -> None:
    attention = _core.CpuAttention(4, 2, 64, "float32")
    starts, lens = np.array([0, 1], dtype=np.int64), np.array([1], dtype=np.int32)
    with pytest.raises(TypeError):
        attention.plan(starts, lens, np.zeros((1, 1), dtype=np.int32), 1)


TENSORS = [
    ("query", (3, 4, 64), None, r"query has shape \[3, 4, 64\], expected \[2, 4, 64\]"),
    ("query", (2, 4, 32), None, r"query has shape \[2, 4, 32\]"),
    ("query", None, (256, 128, 1), r"query has strides \[256, 128, 1\]: that of axis 1 is 128, expected 64"),
    ("query", None, (128, 64, 1), "that of axis 0 is 128, expected at least 256"),
    ("out", None, (256, 64), "out has 2 strides for 3 axes"),
    ("k_cache", (4, 16, 2, 64), None, r"k_cache has shape \[4, 16, 2, 64\], expected \[5, 16, 2, 64\]"),
    ("v_cache", None, (4096, 128, 64, 1), "that of axis 0 is 4096, expected 2048"),
]


@pytest.mark.parametrize(("name", "shape", "strides", "message"), TENSORS)
def test_a_wrong_tensor_is_named(
    name: str, shape: tuple[int, ...] | None, strides: tuple[int, ...] | None, message: str
) -> None:
    attention, views = _planned()
    good = views[name]
    views[name] = _core.TensorView(good.address, shape or good.shape, strides or good.strides)
    with pytest.raises(ValueError, match=message):
        attention.run(**views, scale=0.1)


@pytest.mark.parametrize(("address", "message"), [(0, "v_cache has address 0"), (4098, "no multiple of its")])
def test_a_wrong_address_is_named(address: int, message: str) -> None:
    attention, views = _planned()
    good = views["v_cache"]
    views["v_cache"] = _core.TensorView(address, good.shape, good.strides)
    with pytest.raises(ValueError, match=message):
        attention.run(**views, scale=0.1)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_a_wrong_scale_is_named(scale: float) -> None:
    attention, views = _planned()
    with pytest.raises(ValueError, match="is not positive and finite"):
        attention.run(**views, scale=scale)


def _planned() -> tuple[_core.CpuAttention, dict[str, _core.TensorView]]:
    case = Case(decodes(17, 16), 4, 2, 64, "float32")
    case.num_blocks = 5
    attention = case.attention(num_threads=1)
    shape = (5, BLOCK, 2, 64)
    _KEPT[:] = [np.zeros(shape, dtype=np.float32), np.zeros((2, 4, 64), dtype=np.float32)]
    cache, rows = map(view, _KEPT)
    return attention, {"query": rows, "k_cache": cache, "v_cache": cache, "out": rows}


_EMPTY = np.zeros(0, dtype=np.int32), np.zeros((0, 4), dtype=np.int32)  # lengths and tables of no sequence
_KEPT: list[np.ndarray] = []
