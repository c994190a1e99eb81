"""SharedPrefixAttention against its float64 twin, on random trees of prefixes (GPU)."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
_kernels = pytest.importorskip("parrot._kernels")

from parrot.kernels.shared_prefix import SharedPrefixAttention  # noqa: E402
from prefix_batches import BLOCK, relative_error  # noqa: E402
from prefix_batches import Batch as AnyBatch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


def Batch(*args):
    return AnyBatch(*args, device=torch.device("cuda", torch.cuda.current_device()))


def make_kernel(batch, kv_heads, **options):
    assert kv_heads == batch.kv_heads
    return batch.make_kernel(options.pop("implementation", "cuda"), **options)


TREES = {
    "one-request": [(0, 1)],
    "no-sharing": [(0, 7)],
    "one-group": [(100, 16)],
    "unequal-groups": [(40, 1), (64, 5), (4, 3), (0, 2), (129, 70)],
    "short-prefix": [(1, 9), (3, 2)],
    "long-prefix": [(2000, 3)],
    "two-levels": [(60, [(30, 5), (4, 2), (0, 3)]), (5, 4)],
    "three-levels": [(50, [(20, [(30, 4), (10, 9)]), (6, 3)]), (12, [(70, [(9, 40)])])],
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (16, 1), (8, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equals_float64_attention(tree, heads, kv_heads, head_dim, dtype):
    batch = Batch(
        7, heads, kv_heads, head_dim, dtype, TREES[tree], [1, 5, 16, 17, 31, 32, 33, 64, 100, 257, 700]
    )
    kernel = make_kernel(batch, kv_heads)
    scale = head_dim**-0.5
    reference = batch.reference(scale)
    for share in (True, False):
        kernel.plan(batch.block_tables, batch.seq_lens, share=share)
        output = torch.full_like(batch.query, float("nan"))
        kernel(batch.query, batch.key_cache, batch.value_cache, output, scale)
        limit = 1e-3 if dtype == torch.float16 else 8e-3
        assert relative_error(output, reference) <= limit, (share, kernel.num_entries, kernel.num_parts)


@pytest.mark.parametrize("tree", ["no-sharing", "unequal-groups", "three-levels"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (8, 8, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_triton_twin_equals_float64_attention(tree, heads, kv_heads, head_dim, dtype):
    pytest.importorskip("triton")
    batch = Batch(8, heads, kv_heads, head_dim, dtype, TREES[tree], [1, 16, 17, 100, 257])
    kernel = make_kernel(batch, kv_heads, implementation="triton")
    kernel.plan(batch.block_tables, batch.seq_lens)
    output = torch.full_like(batch.query, float("nan"))
    kernel(batch.query, batch.key_cache, batch.value_cache, output, 0.1)
    assert relative_error(output, batch.reference(0.1)) <= (1e-3 if dtype == torch.float16 else 8e-3)


@pytest.mark.parametrize("tree", [[(7, 5)], [(300, 33)], [(40, [(20, 3), (80, 2)])]])
def test_a_request_may_have_no_token_of_its_own(tree):
    batch = Batch(5, 32, 8, 128, torch.float16, tree, [0, 0, 3])
    kernel = make_kernel(batch, 8)
    kernel.plan(batch.block_tables, batch.seq_lens)
    output = torch.full_like(batch.query, float("nan"))
    kernel(batch.query, batch.key_cache, batch.value_cache, output, 0.1)
    assert relative_error(output, batch.reference(0.1)) <= 1e-3


def test_256_requests():
    batch = Batch(9, 32, 8, 128, torch.float16, [(120, 200), (0, 26), (33, 30)], [1, 2, 70])
    kernel = make_kernel(batch, 8)
    kernel.plan(batch.block_tables, batch.seq_lens)
    output = torch.full_like(batch.query, float("nan"))
    kernel(batch.query, batch.key_cache, batch.value_cache, output, 0.1)
    assert relative_error(output, batch.reference(0.1)) <= 1e-3


def test_a_block_of_threads_takes_many_items_one_after_the_other():
    batch = Batch(11, 64, 64, 128, torch.float16, [(8, 6)] * 4, [5])
    kernel = make_kernel(batch, 64)
    kernel.plan(batch.block_tables, batch.seq_lens)
    assert kernel.num_entries * 64 > 4 * _kernels.shared_prefix_attention_grid(128)  # three are kept at once
    output = torch.full_like(batch.query, float("nan"))
    kernel(batch.query, batch.key_cache, batch.value_cache, output, 0.1)
    assert relative_error(output, batch.reference(0.1)) <= 1e-3


def test_what_the_kernel_ahead_writes_is_seen():
    batch = Batch(4, 32, 8, 128, torch.float16, [(100, 24)], [64])
    kernel = make_kernel(batch, 8)
    kernel.plan(batch.block_tables, batch.seq_lens)
    keys, values, query = batch.key_cache.clone(), batch.value_cache.clone(), batch.query.clone()
    last = [(batch.block_tables[r, (n - 1) // BLOCK], (n - 1) % BLOCK) for r, n in enumerate(batch.seq_lens)]
    blocks, slots = (torch.tensor(x, device="cuda") for x in zip(*last, strict=True))
    keys[blocks, slots] = values[blocks, slots] = query[:] = float("nan")
    output = torch.full_like(batch.query, float("nan"))
    torch.cuda.synchronize()
    keys[blocks, slots] = batch.key_cache[blocks, slots]
    query.copy_(batch.query)
    values[blocks, slots] = batch.value_cache[blocks, slots]
    kernel(query, keys, values, output, 0.1)
    assert relative_error(output, batch.reference(0.1)) <= 1e-3


def test_launches_that_overlap_do_not_touch_each_other():
    batch = Batch(6, 32, 8, 128, torch.float16, [(90, 40), (30, 8)], [20, 300])
    kernel = make_kernel(batch, 8)
    kernel.plan(batch.block_tables, batch.seq_lens)
    outputs = [torch.full_like(batch.query, float("nan")) for _ in range(50)]
    torch.cuda.synchronize()
    for output in outputs:
        kernel(batch.query, batch.key_cache, batch.value_cache, output, 0.1)
    assert relative_error(outputs[0], batch.reference(0.1)) <= 1e-3
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("offset", range(1, 18))
def test_suffix_may_end_anywhere_in_a_block(offset):
    batch = Batch(offset, 8, 8, 128, torch.float16, [(20, 6)], [offset])
    kernel = make_kernel(batch, 8)
    kernel.plan(batch.block_tables, batch.seq_lens)
    output = torch.full_like(batch.query, float("nan"))
    kernel(batch.query, batch.key_cache, batch.value_cache, output, 0.1)
    assert relative_error(output, batch.reference(0.1)) <= 1e-3


def test_a_gpu_named_without_its_number_is_the_current_one():
    batch = Batch(7, 32, 8, 128, torch.float16, TREES["one-group"], [17])
    bare = AnyBatch(7, 32, 8, 128, torch.float16, TREES["one-group"], [17], device=torch.device("cuda"))
    kernel = make_kernel(bare, 8)
    kernel.plan(batch.block_tables, batch.seq_lens)
    output = torch.full_like(batch.query, float("nan"))
    kernel(batch.query, batch.key_cache, batch.value_cache, output, 0.1)
    assert relative_error(output, batch.reference(0.1)) <= 1e-3


def test_a_plan_gives_the_same_bits_every_time():
    batch = Batch(3, 32, 8, 128, torch.float16, [(300, 20), (50, 9)], [40, 200, 900])
    kernel = make_kernel(batch, 8)
    kernel.plan(batch.block_tables, batch.seq_lens)
    outputs = []
    for _ in range(20):
        output = torch.full_like(batch.query, float("nan"))
        kernel(batch.query, batch.key_cache, batch.value_cache, output, 0.1)
        outputs.append(output)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_a_graph_captured_on_one_tree_replays_on_another():
    first = Batch(1, 32, 8, 128, torch.float16, [(30, 12)], [20, 50])
    second = Batch(2, 32, 8, 128, torch.float16, [(2, 3), (25, 9)], [3, 90])
    kernel = SharedPrefixAttention(
        max_requests=12,
        max_blocks=64,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        device=torch.device("cuda", 0),
    )
    blocks = max(len(first.key_cache), len(second.key_cache))
    keys, values = (torch.zeros(blocks, BLOCK, 8, 128, dtype=torch.float16, device="cuda") for _ in range(2))
    query, output = torch.zeros_like(first.query), torch.zeros_like(first.query)

    def put(batch):
        keys[: len(batch.key_cache)], values[: len(batch.key_cache)] = batch.key_cache, batch.value_cache
        query.copy_(batch.query)
        kernel.plan(batch.block_tables, batch.seq_lens)
        output.fill_(float("nan"))

    put(first)
    kernel(query, keys, values, output, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(query, keys, values, output, 0.1)
    for batch in (second, first):
        put(batch)
        graph.replay()
        assert relative_error(output, batch.reference(0.1)) <= 1e-3


def test_wrong_shapes_and_dtypes_are_named():
    batch = Batch(1, 8, 8, 64, torch.float16, [(3, 2)], [5])
    kernel = make_kernel(batch, 8)
    kernel.plan(batch.block_tables, batch.seq_lens)
    output = torch.empty_like(batch.query)
    with pytest.raises(ValueError, match="query axis 0 is 1, expected 2"):
        kernel(batch.query[:1], batch.key_cache, batch.value_cache, output, 0.1)
    with pytest.raises(ValueError, match=r"key_cache is torch\.bfloat16"):
        kernel(batch.query, batch.key_cache.bfloat16(), batch.value_cache, output, 0.1)
    with pytest.raises(ValueError, match=r"seq_lens\[1\]"):
        kernel.plan(batch.block_tables, np.array([3, 10**6], dtype=np.int32))
