"""What does not fit SharedPrefixAttention is refused before anything is uploaded or launched, and the error
names the argument, its axis and both values."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from parrot.kernels.shared_prefix import PlanCosts, SharedPrefixAttention  # noqa: E402
from parrot.kernels.staging import Staging  # noqa: E402

HALF = torch.float16
SIZES = {"max_requests": 4, "max_blocks": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def make(**options):
    defaults = {**SIZES, "max_parts": 64, "implementation": "triton"}
    return SharedPrefixAttention(**{"device": torch.device("cpu"), **defaults, **options})


def tables(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


@pytest.fixture(scope="module")
def planned() -> SharedPrefixAttention:
    kernel = make()
    kernel.plan(tables([0, 1], [0, 5]), np.array([20, 32], np.int32))
    return kernel


def tensors() -> dict[str, torch.Tensor]:
    rows, cache = (2, 4, 16), (6, 16, 2, 16)
    shapes = {"query": rows, "key_cache": cache, "value_cache": cache, "output": rows}
    return {name: torch.zeros(shape, dtype=HALF) for name, shape in shapes.items()}


def unaligned(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.numel() + 1, dtype=like.dtype)[1:].view(like.shape)


def without_memory(like: torch.Tensor) -> torch.Tensor:
    emptied = like.clone()
    emptied.untyped_storage().resize_(0)
    return emptied


def strided(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*like.shape[:-1], 2 * like.shape[-1], dtype=like.dtype)[..., ::2]


CALLS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("query", lambda t: t[:1], r"^query axis 0 is 1, expected 2$"),
    ("query", lambda t: t[:, :2], r"^query axis 1 is 2, expected 4$"),
    ("query", lambda t: t[..., None], r"^query has 4 axes \(2, 4, 16, 1\), expected 3$"),
    ("query", lambda t: t.double(), r"^query is torch\.float64, expected torch\.float16 or torch\.bfloat16"),
    ("query", lambda t: t.bfloat16(), r"^output is torch\.float16, expected torch\.bfloat16$"),
    ("output", lambda t: t.float(), r"^output is torch\.float32, expected torch\.float16$"),
    ("output", lambda t: t.to("meta"), r"^output is on meta, expected cpu$"),
    ("output", strided, r"^output axis 2 has stride 2, expected 1$"),
    ("output", unaligned, r"^output begins 2 bytes past a multiple of 16, expected 0$"),
    ("key_cache", lambda t: t[:, :8], r"^key_cache axis 1 is 8, expected 16$"),
    ("key_cache", lambda t: t[:, :, :1], r"^key_cache axis 2 is 1, expected 2$"),
    ("key_cache", lambda t: t[0, 0, 0, 0], r"^key_cache has 0 axes \(\), expected 4$"),
    ("key_cache", lambda t: t.transpose(1, 3), r"^key_cache axis 3 has stride 32, expected 1$"),
    ("value_cache", lambda t: t[:5], r"^value_cache axis 0 is 5, expected 6$"),
    ("value_cache", lambda t: t[..., :8], r"^value_cache axis 3 is 8, expected 16$"),
    ("value_cache", unaligned, r"^value_cache begins 2 bytes past a multiple of 16"),
    ("key_cache", without_memory, r"^key_cache has a storage of 0 bytes, expected 6144$"),
]


@pytest.mark.parametrize(("name", "change", "message"), CALLS)
def test_a_tensor_that_does_not_fit_is_named(planned, name, change, message):
    arguments = tensors()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        planned(**arguments, scale=0.1)
    assert arguments["output"].is_meta or not arguments["output"].any()


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "output"])
@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (np.zeros(3), "ndarray"), ([], "list")])
def test_what_is_no_tensor_is_named(planned, name, value, kind):
    with pytest.raises(TypeError, match=f"^{name} is of type {kind}, expected torch.Tensor$"):
        planned(**{**tensors(), name: value}, scale=0.1)


def test_a_cache_without_a_block_of_the_plan_is_refused(planned):
    arguments = tensors()
    for name in ("key_cache", "value_cache"):
        arguments[name] = arguments[name][:5]
    with pytest.raises(ValueError, match=r"^key_cache axis 0 is 5, expected at least 6: .* name block 5$"):
        planned(**arguments, scale=0.1)


LENGTHS = np.array([20, 32], np.int32)
TABLES = tables([0, 1], [0, 5])
PLANS = [
    (np.zeros((2, 4), np.int32), LENGTHS, r"^block_tables axis 1 is 4, expected at most 3$"),
    (np.zeros((5, 2), np.int32), np.ones(5, np.int32), r"^block_tables axis 0 is 5, expected at most 4$"),
    (TABLES, LENGTHS[:1], r"^seq_lens axis 0 is 1, expected 2$"),
    (TABLES.astype(np.int64), LENGTHS, r"^block_tables is int64, expected int32$"),
    (TABLES, LENGTHS.astype(np.float32), r"^seq_lens is float32, expected int32$"),
    (TABLES[0], LENGTHS, r"^block_tables has 1 axes \(2,\), expected 2$"),
    (TABLES.T, LENGTHS, r"^block_tables axis 0 has a stride of 4 bytes, expected 8$"),
    (TABLES, np.array([20, 33], np.int32), r"^seq_lens\[1\] = 33 is outside \[1, 32\]$"),
    (TABLES, np.array([0, 32], np.int32), r"^seq_lens\[0\] = 0 is outside \[1, 32\]$"),
    (tables([0, 1], [0, -1]), LENGTHS, r"^block_tables\[1, 1\] = -1 within seq_lens$"),
    (tables([0, 7], [0, 5]), LENGTHS, r"^block_tables\[0, 1\] is 7, expected below num_blocks = 6$"),
]


@pytest.mark.parametrize(("block_tables", "seq_lens", "message"), PLANS)
def test_tables_and_lengths_that_do_not_fit_are_named(block_tables, seq_lens, message):
    kernel = make(num_blocks=6)
    kernel.plan(TABLES, LENGTHS)
    uploaded = {name: tensor.clone() for name, tensor in kernel._staging.device.items()}
    with pytest.raises(ValueError, match=message):
        kernel.plan(block_tables, seq_lens)
    for name, tensor in kernel._staging.device.items():
        assert torch.equal(tensor, uploaded[name])


@pytest.mark.parametrize(
    ("block_tables", "seq_lens", "message"),
    [
        (None, LENGTHS, "^block_tables is of type NoneType, expected numpy.ndarray$"),
        ([[0, 1], [0, 5]], LENGTHS, "^block_tables is of type list, expected numpy.ndarray$"),
        (TABLES, torch.from_numpy(LENGTHS), "^seq_lens is of type Tensor, expected numpy.ndarray$"),
    ],
)
def test_what_is_no_array_is_named(block_tables, seq_lens, message):
    with pytest.raises(TypeError, match=message):
        make().plan(block_tables, seq_lens)


def test_a_number_of_rows_that_is_none_is_named():
    for value, kind in (("4", "str"), (2.0, "float")):
        with pytest.raises(TypeError, match=f"^num_rows is of type {kind}, expected a whole number$"):
            make().write_plan(TABLES, LENGTHS, num_rows=value)


def test_a_block_past_the_end_of_a_request_may_be_anything():
    kernel = make(num_blocks=6)
    kernel.plan(tables([0, 1, 99], [0, 5, -7]), LENGTHS)
    assert kernel.num_sharing == 0  # 16 shared tokens are too few


def test_a_block_that_is_refused_once_is_no_reason_to_refuse_the_next_plan():
    kernel = make(num_blocks=6)
    kernel.plan(TABLES, LENGTHS)
    for lengths in (LENGTHS + 16, LENGTHS):
        with pytest.raises(ValueError, match="expected below num_blocks = 6"):
            kernel.plan(tables([0, 1, 9], [0, 7, 2]), lengths)
    kernel.plan(TABLES, LENGTHS)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_kv_heads": 3}, r"^num_heads is 4, expected 1 to 64 times num_kv_heads, which is 3$"),
        ({"num_heads": 130}, r"^num_heads is 130, expected 1 to 64 times num_kv_heads, which is 2$"),
        ({"head_dim": 24}, r"^head_dim is 24, expected a power of two from 16$"),
        ({"head_dim": 256, "implementation": "cuda"}, r"^head_dim is 256, expected 64 or 128$"),
        ({"implementation": "torch"}, r"^implementation is 'torch', expected 'cuda' or 'triton'$"),
        ({"max_parts": 0}, r"^max_parts is 0, expected at least 1$"),
        ({"max_requests": -1}, r"^max_requests is -1, expected at least 1$"),
        ({"num_blocks": 0}, r"^num_blocks is 0, expected at least 1$"),
        (
            {"staging": Staging({"num_entries": 4}, torch.device("cpu"))},
            r"^staging has no section 'part_begin', expected one of 5 elements$",
        ),
        (
            {"staging": Staging(SharedPrefixAttention.sections(4, 2, 64), torch.device("cpu"))},
            r"^staging section 'block_tables' axis 0 is 8, expected 12$",
        ),
    ],
)
def test_sizes_that_no_kernel_has_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        make(**sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: value}, f"^{name} is of type {kind}, expected a whole number$")
            for name in (*SIZES, "max_parts", "num_blocks")
            for value, kind in (("4", "str"), (4.0, "float"), (True, "bool"), ([], "list"))
        ),
        *(({name: None}, f"^{name} is of type NoneType") for name in (*SIZES, "max_parts")),
        ({"device": "cpu"}, "^device is of type str, expected torch.device$"),
        ({"device": None}, "^device is of type NoneType"),
        ({"costs": {"entry_tokens": 1}}, "^costs is of type dict, expected PlanCosts or None$"),
        (
            {"costs": PlanCosts(1, 2.5, 3)},
            "^costs.own_entry_tokens is of type float, expected a whole number$",
        ),
        ({"staging": {}}, "^staging is of type dict, expected Staging or None$"),
    ],
)
def test_an_argument_of_another_type_is_named(options, message):
    with pytest.raises(TypeError, match=message):
        make(**options)


def test_whole_numbers_of_numpy_are_sizes():
    make(**{name: np.int64(size) for name, size in SIZES.items()}, num_blocks=np.int32(6)).plan(
        TABLES, LENGTHS
    )


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), "0.1", None, 4e300])
def test_a_scale_that_is_no_finite_number_is_refused(planned, scale):
    arguments = tensors()
    with pytest.raises(ValueError, match=f"^scale is {re.escape(repr(scale))}, expected a finite number$"):
        planned(**arguments, scale=scale)
    assert not arguments["output"].any()


def test_the_cuda_kernel_is_for_a_gpu():
    pytest.importorskip("parrot._kernels")
    with pytest.raises(ValueError, match=r"^device is cpu, expected a CUDA GPU$"):
        make(implementation="cuda", head_dim=64)


def test_a_staging_on_another_device_is_named():
    staging = Staging(SharedPrefixAttention.sections(4, 3, 64), torch.device("meta"))
    with pytest.raises(ValueError, match=r"^staging section 'num_entries' is on meta, expected cpu$"):
        make(staging=staging)


@pytest.mark.parametrize("num_heads", [0, -8])
def test_the_cuda_module_refuses_heads_that_are_none(num_heads):
    kernels = pytest.importorskip("parrot._kernels")
    addresses = ("query", "key_cache", "value_cache", "output", "block_tables", "entries", "num_entries")
    addresses += ("members", "part_begin", "part_output", "part_max_sum", "next_work")
    sizes = {"num_requests": 1, "num_blocks": 1, "max_blocks": 1, "num_kv_heads": 2, "head_dim": 128}
    with pytest.raises(ValueError, match=f"^num_heads = {num_heads} is not a multiple of num_kv_heads = 2"):
        kernels.shared_prefix_attention(
            **dict.fromkeys(addresses, 1 << 12),
            **sizes,
            num_heads=num_heads,
            is_bfloat16=False,
            softmax_scale=0.1,
            stream=0,
        )
