"""The Triton twin of SharedPrefixAttention against its float64 twin, on the GPU where there is one, else in
Triton's interpreter at small sizes; and hard-cases 7 for every implementation that this machine runs."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from parrot.kernels.shared_prefix import SharedPrefixAttention  # noqa: E402
from prefix_batches import Batch, random_tree, relative_error  # noqa: E402

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if ON_GPU else []
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
IMPLEMENTATIONS = ["triton"] + ["cuda"] * (ON_GPU and importlib.util.find_spec("parrot._kernels") is not None)
# The interpreter multiplies bfloat16 as if its bits were integers.
HALVES = [torch.float16] + [torch.bfloat16] * ON_GPU

TREES = {
    "one request": ([(0, 1)], [70]),
    "no sharing": ([(0, 3)], [1, 40, 17]),
    "one group": ([(9, 5)], [3, 16, 33]),
    "unequal groups": ([(5, 1), (8, 4), (0, 1), (6, 9)], [1, 16, 20]),
    "two levels": ([(6, [(5, 2), (0, 2)]), (4, 2)], [4, 18]),
    "three levels": ([(4, [(4, [(5, 2), (4, 3)]), (6, 2)])], [5, 16, 31]),
    "no token of their own": ([(7, 2), (5, [(4, 2), (4, 3)])], [0, 0, 3]),
}


def make(name, heads, kv_heads, head_dim, dtype, seed=3):
    tree, suffixes = TREES[name]
    return Batch(seed, heads, kv_heads, head_dim, dtype, tree, suffixes, DEVICE)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("dtype", HALVES)
def test_the_triton_twin_equals_float64_attention_on_every_kind_of_tree(name, dtype):
    batch = make(name, 4, 2, 32, dtype)
    batch.check(batch.make_kernel("triton"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(24 if ON_GPU else 10))
def test_any_tree_with_any_layout_of_heads(implementation, seed):
    rng = np.random.default_rng(seed)
    heads, kv_heads = [(4, 4), (4, 2), (8, 1), (6, 2)][seed % 4]
    head_dim, dtype = int(rng.choice([64, 128] if ON_GPU else [16, 64])), HALVES[seed // 4 % len(HALVES)]
    suffixes = [0, 1, *rng.integers(1, 200, 4)]
    batch = Batch(seed, heads, kv_heads, head_dim, dtype, random_tree(rng), suffixes, DEVICE)
    batch.check(batch.make_kernel(implementation))


def test_members_beyond_the_rows_of_an_entry_get_entries_of_their_own():
    batch = Batch(6, 16, 1, 16, torch.float16, [(20, 6)], [2], DEVICE)
    kernel = batch.make_kernel("triton")
    batch.check(kernel)
    assert kernel.num_sharing == 6


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 1), (6, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_triton_twin_takes_every_layout_of_heads(heads, kv_heads, head_dim):
    batch = make("two levels", heads, kv_heads, head_dim, torch.float16)
    batch.check(batch.make_kernel("triton"), head_dim**-0.5)


@pytest.mark.parametrize("offset", range(1, 18))
def test_a_suffix_may_end_anywhere_in_a_block(offset):
    batch = Batch(offset, 2, 1, 16, torch.float16, [(5, 3)], [offset], DEVICE)
    batch.check(batch.make_kernel("triton"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_buffers_of_one_tree_serve_the_next(implementation):
    first, second = (make(name, 4, 1, 64, torch.float16) for name in ("one group", "three levels"))
    kernel = second.make_kernel(implementation)
    for batch in (first, second, first):
        batch.check(kernel)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_plan_gives_the_same_bits_every_time(implementation):
    batch = make("unequal groups", 4, 1, 64, torch.float16)
    kernel = batch.make_kernel(implementation)
    kernel.plan(batch.block_tables, batch.seq_lens, min_chunk_tokens=64)
    first, second = batch.run(kernel, 0.1), batch.run(kernel, 0.1)
    assert torch.equal(first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["unequal groups", "three levels", "long prefix"])
def test_shared_attention_equals_attention_of_each_request(implementation, dtype, name):
    """hard-cases 7: unequal groups, depth above one, long prefixes, both dtypes; and the off switch."""
    if name == "long prefix":
        batch = Batch(4, 4, 1, 64, dtype, [(2000 if ON_GPU else 130, 3)], [7, 40], DEVICE)
    else:
        batch = make(name, 4, 1, 64, dtype)
    kernel = batch.make_kernel(implementation)
    kernel.plan(batch.block_tables, batch.seq_lens)
    assert kernel.num_sharing > 0
    shared = batch.run(kernel, 0.1)
    kernel.plan(batch.block_tables, batch.seq_lens, share=False)
    assert kernel.num_sharing == 0
    alone = batch.run(kernel, 0.1)
    reference, limit = batch.reference(0.1), 1e-3 if dtype == torch.float16 else 8e-3
    assert relative_error(shared, reference) <= limit
    assert relative_error(alone, reference) <= limit


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA GPU")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_graph_captured_on_one_tree_replays_on_others(implementation):
    batches = [make(name, 4, 2, 64, torch.float16) for name in TREES]
    blocks = max(len(batch.key_cache) for batch in batches)
    widest = max(batches, key=lambda batch: batch.block_tables.shape[1])
    most = max(batches, key=lambda batch: len(batch.query))
    kernel = SharedPrefixAttention(
        max_requests=len(most.query),
        max_blocks=widest.block_tables.shape[1],
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        device=DEVICE,
        implementation=implementation,
    )
    keys, values = (torch.zeros(blocks, 16, 2, 64, dtype=torch.float16, device=DEVICE) for _ in range(2))
    query, output = torch.zeros_like(most.query), torch.zeros_like(most.query)

    def put(batch):
        n = len(batch.query)
        keys[: len(batch.key_cache)], values[: len(batch.key_cache)] = batch.key_cache, batch.value_cache
        query[:n] = batch.query
        kernel.plan(batch.block_tables, batch.seq_lens)
        output.fill_(float("nan"))
        return n

    put(most)
    kernel(query, keys, values, output, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(query, keys, values, output, 0.1)
    for batch in (*batches, *reversed(batches)):
        n = put(batch)
        graph.replay()
        assert relative_error(output[:n], batch.reference(0.1)) <= 1e-3
        assert output[n:].isnan().all()  # rows past the batch are nobody's


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA GPU")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [1, 2, 31, 64, 65, 255, 256])
def test_any_number_of_requests_up_to_256(implementation, count):
    tree = [(70, [(20, count // 2), (9, count - count // 2)])] if count > 1 else [(70, 1)]
    batch = Batch(count, 32, 8, 128, torch.float16, tree, [1, 2, 70], DEVICE)
    batch.check(batch.make_kernel(implementation))
