"""Paged prefill in CUDA and in Triton against attention in float64 (GPU); what the CUDA kernel refuses, and
which steps go to it."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
_kernels = pytest.importorskip("parrot._kernels")

from parrot.kernels import gpu_ops  # noqa: E402
from parrot.kernels.ops import DecoderShape  # noqa: E402
from parrot.kernels.paged_prefill import LOW, TALL, PrefillPlan, paged_prefill, prefill_tiles  # noqa: E402
from parrot.kernels.paged_prefill_cuda import CudaPrefill, check_arguments  # noqa: E402

BLOCK = 16
UNUSED = 2**30  # a block that nobody may read
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
IMPLEMENTATIONS = ["cuda", "triton-low", "triton-tall"]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


class Chunks:
    """A step of ``chunks`` (tokens before, rows), after three rows of other sequences and before two more:
    shuffled pages, NaN in every slot that no sequence has, no block behind the last one of a sequence."""

    def __init__(self, chunks, heads, kv_heads, head_dim, dtype, seed=0):
        self.chunks, self.kv_heads = chunks, kv_heads
        self.device = torch.device("cuda", torch.cuda.current_device())
        generator = torch.Generator(self.device).manual_seed(seed)
        self.start = [3]
        for _, rows in chunks:
            self.start.append(self.start[-1] + rows)
        self.lengths = [before + rows for before, rows in chunks]
        self.scale = head_dim**-0.5

        def random(*shape):
            return torch.randn(shape, generator=generator, device=self.device).to(dtype)

        self.query = random(self.start[-1] + 2, heads, head_dim)
        counts = [-(-length // BLOCK) for length in self.lengths]
        shape = sum(counts) + 3, BLOCK, kv_heads, head_dim
        self.keys, self.values = (torch.full(shape, math.nan, dtype=dtype, device=self.device) for _ in "kv")
        pages = torch.randperm(sum(counts) + 3, generator=generator, device=self.device)
        self.tables = torch.full(
            (len(chunks) + 1, max(counts) + 2), UNUSED, dtype=torch.int32, device=self.device
        )
        for i, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            mine, pages = pages[:count], pages[count:]
            self.tables[i + 1, :count] = mine
            at = torch.arange(length, device=self.device)
            self.keys[mine[at // BLOCK], at % BLOCK] = random(length, kv_heads, head_dim)
            self.values[mine[at // BLOCK], at % BLOCK] = random(length, kv_heads, head_dim)

    def run(self, implementation):
        """All rows; those of no chunk are NaN."""
        kernel, rows = paged_prefill, TALL if implementation == "triton-tall" else LOW
        if implementation == "cuda":
            if not CudaPrefill.supports(self.device, self.query.shape[2]):
                pytest.skip("the CUDA kernel is for compute capability 9.0")
            kernel = CudaPrefill(self.device)
            rows = kernel.rows
        tiles = prefill_tiles(self.start, self.lengths, range(len(self.chunks)), 1, rows)
        plan = PrefillPlan(
            torch.from_numpy(tiles).to(self.device), self.tables, rows, num_tokens=sum(self.lengths)
        )
        for _ in range(2):  # the first launch has to leave the CUDA kernel's counter zero
            output = torch.full_like(self.query, math.nan)
            kernel(self.query, self.keys, self.values, output, plan, self.scale)
        return output

    def reference(self, i):
        """Chunk ``i`` in float64 [rows, heads, head_dim], a head at a time."""
        before, length = self.chunks[i][0], self.lengths[i]
        query = self.query[self.start[i] : self.start[i + 1]].double()
        ids = self.tables[i + 1, : -(-length // BLOCK)].long()
        keys, values = (x[ids].flatten(0, 1)[:length].double() for x in (self.keys, self.values))
        at = torch.arange(length, device=self.device)
        is_hidden = at[None, :] > at[before:, None]
        heads = []
        for head in range(query.shape[1]):
            kv_head = head // (query.shape[1] // self.kv_heads)
            scores = (query[:, head] @ keys[:, kv_head].T * self.scale).masked_fill(is_hidden, -math.inf)
            heads.append(scores.softmax(-1) @ values[:, kv_head])
        return torch.stack(heads, dim=1)

    def check(self, implementation):
        output = self.run(implementation)
        assert output[:3].isnan().all()
        assert output[self.start[-1] :].isnan().all()
        for i, chunk in enumerate(self.chunks):
            expected = self.reference(i)
            error = (output[self.start[i] : self.start[i + 1]].double() - expected).abs().max()
            assert error <= LIMITS[self.query.dtype] * expected.abs().max(), chunk


STEPS = {
    "one row": [(0, 1)],
    "one row after many tokens": [(1000, 1)],
    "around half a tile": [(0, 63), (0, 64), (0, 65)],
    "around a tile": [(0, 127), (0, 128), (0, 129)],
    "over the border of a tile": [(100, 60), (63, 64), (127, 129), (129, 127)],
    "a few long ones": [(37, 700), (2048, 300), (0, 1025)],
    "many of all lengths": [(i * 37 % 500, 1 + i * 91 % 400) for i in range(23)],
    "many of one row": [(i * 13, 1) for i in range(40)],
}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_float64_attention(implementation, dtype, head_dim, heads, kv_heads, step):
    Chunks(STEPS[step], heads, kv_heads, head_dim, dtype).check(implementation)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("offset", range(1, 18))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_chunk_may_begin_and_end_anywhere_in_a_block(implementation, offset):
    chunks = [(offset, 70), (0, 140 + offset), (offset + 90, 33 - offset)]
    Chunks(chunks, 2, 1, 128, torch.float16, seed=offset).check(implementation)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_chunk_of_a_context_of_32k_tokens(implementation):
    Chunks([(32_000, 700)], 2, 1, 128, torch.float16).check(implementation)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_more_keys_and_values_than_the_cache_of_the_device_holds(implementation):
    Chunks([(9000, 200)] * 8, 10, 5, 128, torch.float16).check(implementation)


@pytest.mark.gpu
@on_gpu
def test_launches_in_a_row_give_the_same_bits():
    chunks = Chunks([(300, 900), (0, 500)], 8, 2, 128, torch.float16)
    first = chunks.run("cuda")
    assert all(torch.equal(first[3:-2], chunks.run("cuda")[3:-2]) for _ in range(20))


@pytest.mark.gpu
@on_gpu
def test_tensors_that_do_not_fit_are_named():
    chunks = Chunks([(5, 9)], 4, 2, 128, torch.float16)
    chunks.values = chunks.values[:, :, :1]
    with pytest.raises(ValueError, match="value_cache axis 2 is 1, expected 2"):
        chunks.run("cuda")


def arguments(**changed):
    """Of a call that fits, on the CPU, with some ``changed``; rows of the plan are ``rows``."""
    rows, cache = (
        torch.zeros(9, 4, 64, dtype=torch.float16),
        torch.zeros(3, BLOCK, 2, 64, dtype=torch.float16),
    )
    fitting = {"query": rows, "key_cache": cache, "value_cache": cache.clone(), "output": rows.clone()}
    tables = torch.zeros(1, 3, dtype=torch.int32)
    plan = {
        "tiles": torch.zeros(2, 4, dtype=torch.int32),
        "block_tables": tables,
        "rows": 128,
        "num_tokens": 9,
    }
    plan |= {name: changed.pop(name) for name in [*changed] if name in plan}
    return {**fitting, "plan": PrefillPlan(**plan), "rows": 128, "device": torch.device("cpu"), **changed}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"query": None}, TypeError, "query is of type NoneType, expected torch.Tensor"),
        (
            {"query": torch.zeros(9, 4, dtype=torch.float16)},
            ValueError,
            r"query has 2 axes \(9, 4\), expected 3",
        ),
        ({"key_cache": [1]}, TypeError, "key_cache is of type list, expected torch.Tensor"),
        ({"key_cache": torch.zeros(3)}, ValueError, r"key_cache has 1 axes \(3,\), expected 4"),
        ({"output": "out"}, TypeError, "output is of type str, expected torch.Tensor"),
        ({"plan": None}, TypeError, "plan is of type NoneType, expected PrefillPlan"),
        ({"rows": 64}, ValueError, "plan.rows is 64, expected 128"),
        ({"tiles": torch.zeros(2, 4)}, ValueError, "plan.tiles is torch.float32, expected torch.int32"),
        ({"tiles": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, "plan.tiles axis 1 is 3, expected 4"),
        ({"tiles": None}, TypeError, "plan.tiles is of type NoneType, expected torch.Tensor"),
        ({"tiles": torch.zeros(2, 4, dtype=torch.int32, device="meta")}, ValueError, "plan.tiles is on meta"),
        (
            {"block_tables": torch.zeros(3, 1, dtype=torch.int64)},
            ValueError,
            "plan.block_tables is torch.int64, expected torch.int32",
        ),
        (
            {"block_tables": torch.zeros(3, 2, dtype=torch.int32)[:, :1]},
            ValueError,
            "plan.block_tables axis 0 has stride 2, expected 1",
        ),
        ({"block_tables": torch.zeros(3, dtype=torch.int32)}, ValueError, r"plan.block_tables has 1 axes"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changed, error, message):
    check_arguments(**arguments())
    with pytest.raises(error, match=f"^{message}"):
        check_arguments(**arguments(**changed))


def test_the_cuda_kernel_is_for_a_gpu():
    with pytest.raises(ValueError, match=r"^device is cpu, expected a CUDA GPU$"):
        CudaPrefill(torch.device("cpu"))


CALL = {
    **dict.fromkeys(
        ("query", "key_cache", "value_cache", "output", "tiles", "block_tables", "next_work"), 1 << 12
    ),
    **dict.fromkeys(("num_rows", "num_tiles", "num_tokens", "num_blocks", "max_blocks"), 1),
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 128,
    "is_bfloat16": False,
    "softmax_scale": 0.1,
    "stream": 0,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 96}, "head_dim = 96, need 64 or 128"),
        ({"num_kv_heads": 3}, "num_heads = 8 is not a multiple of num_kv_heads = 3"),
        ({"num_kv_heads": 0}, "num_kv_heads = 0"),
        ({"num_tiles": 0}, "num_tiles = 0, need 1 or more"),
        ({"num_tokens": -4}, "num_tokens = -4, need 1 or more"),
        ({"softmax_scale": math.nan}, "softmax_scale = nan, need a positive number"),
        ({"softmax_scale": -1.0}, "softmax_scale = -1"),
        ({"output": 0}, "output is null"),
        ({"tiles": 4100}, "tiles = 4100 is not aligned to 16 bytes"),
        ({"next_work": 4098}, "next_work = 4098 is not aligned to 4 bytes"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        _kernels.paged_prefill(**(CALL | changed))


def test_only_hopper_has_the_kernel():
    assert not CudaPrefill.supports(torch.device("cpu"), 128)


def test_tall_tiles_go_to_the_cuda_kernel_where_there_is_one(monkeypatch):
    calls = []

    class Kernel:
        rows = _kernels.paged_prefill_rows()

        def __init__(self, _device):
            pass

        @staticmethod
        def supports(_device, head_dim):
            return head_dim == 64

        def __call__(self, *_arguments):
            calls.append("cuda")

    monkeypatch.setattr(gpu_ops, "CudaPrefill", Kernel)
    monkeypatch.setattr(gpu_ops, "paged_prefill", lambda *_arguments: calls.append("triton"))
    tensor = torch.zeros(1)
    for attention, head_dim, expected in (
        ("cuda", 64, ["triton", "cuda"]),
        ("cuda", 32, ["triton", "triton"]),
        ("triton", 64, ["triton", "triton"]),
    ):
        shape = DecoderShape(2, 1, head_dim, 1e-5, torch.ones(head_dim // 2))
        ops = gpu_ops.GpuOps(shape, torch.device("cpu"), max_positions=4, attention=attention)
        calls.clear()
        for rows in (LOW, TALL):
            ops.prefill(tensor, tensor, tensor, tensor, PrefillPlan(tensor, tensor, rows, num_tokens=1), 1.0)
        assert calls == expected
