"""Logits of the decoder against transformers: every position, however the tokens were computed, with the
operations of each backend."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paged_sequences import PagedRunner, PagedSequence
from parrot import _core
from parrot.config import Backend
from parrot.engine import backends
from parrot.engine.backends import choose_backend, choose_dtype
from parrot.engine.batch import PagedKV, StepBatch
from parrot.engine.model import DecoderModel
from parrot.errors import ConfigError
from tiny_models import FAMILIES, write_family, write_tiny_model

TOLERANCE = 1e-4


@cache
def load(directory: Path, backend: Backend = "torch", dtype: torch.dtype = torch.float32) -> DecoderModel:
    return DecoderModel.load(directory, dtype, "cpu", backend)


@cache
def transformers_logits(directory: Path, ids: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """float32 [len(ids), vocab]."""
    with torch.no_grad():
        logits: Tensor = _transformers_model(directory, dtype)(torch.tensor([ids])).logits[0]
    return logits.float()


@cache
def _transformers_model(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def random_ids(model: DecoderModel, length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, model.config.vocab_size) for _ in range(length)]


def relative_error(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


def assert_right(directory: Path, sequence: PagedSequence) -> None:
    expected = transformers_logits(directory, tuple(sequence.ids))
    assert relative_error(torch.stack(sequence.logits), expected) <= TOLERANCE
    worst = max(relative_error(a, b) for a, b in zip(sequence.logits, expected, strict=True))
    assert worst <= TOLERANCE


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each family that differs from the tiny models."""
    root = tmp_path_factory.mktemp("families")
    return {family: write_family(root / family, family) for family in FAMILIES}


@pytest.fixture(
    params=["tiny_model", "tiny_mha_model", pytest.param("smollm2_dir", marks=pytest.mark.model), *FAMILIES]
)
def directory(request: pytest.FixtureRequest) -> Path:
    path: Path
    if request.param in FAMILIES:
        path = request.getfixturevalue("families")[request.param]
    else:
        path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> Backend:
    name: Backend = request.param
    return name


def test_a_whole_prompt_in_one_step(directory: Path, backend: Backend) -> None:
    model, sequence = load(directory, backend), PagedSequence()
    PagedRunner(model).step((sequence, random_ids(model, 83)))
    assert_right(directory, sequence)


@pytest.mark.parametrize("seed", range(3))
def test_prefill_in_chunks_of_random_size(directory: Path, seed: int, backend: Backend) -> None:
    model, sequence, rng = load(directory, backend), PagedSequence(), random.Random(seed)
    runner, ids = PagedRunner(model, seed=seed), random_ids(model, 90, seed)
    while len(sequence.ids) < len(ids):
        start = len(sequence.ids)
        runner.step((sequence, ids[start : start + rng.randint(1, 40)]))
    assert_right(directory, sequence)


def test_decoding_token_by_token(directory: Path, backend: Backend) -> None:
    model, sequence = load(directory, backend), PagedSequence()
    runner = PagedRunner(model)
    for token in random_ids(model, 35):
        runner.step((sequence, [token]))
    assert_right(directory, sequence)


@pytest.mark.parametrize("length", [1, 15, 16, 31])
def test_forks_at_any_offset_do_not_disturb_each_other(
    directory: Path, length: int, backend: Backend
) -> None:
    model, parent = load(directory, backend), PagedSequence()
    runner = PagedRunner(model)
    runner.step((parent, random_ids(model, 41)))
    children = [runner.fork(parent, length) for _ in range(3)]
    runner.step(*[(child, random_ids(model, 5 + i, seed=i)) for i, child in enumerate(children)])
    runner.step((parent, [7]), *[(child, [11 + i]) for i, child in enumerate(children)])
    for sequence in (parent, *children):
        assert_right(directory, sequence)


def test_steps_that_mix_prefill_chunks_and_decodes(directory: Path, backend: Backend) -> None:
    model, rng = load(directory, backend), random.Random(3)
    runner = PagedRunner(model)
    sequences = [PagedSequence() for _ in range(6)]
    for step in range(8):
        active = rng.sample(sequences, rng.randint(2, 6))
        work = [
            (s, random_ids(model, rng.choice([1, 1, 1, 6, 17]), seed=step * 10 + i))
            for i, s in enumerate(active)
        ]
        runner.step(*work)
    assert max(len(sequence.ids) for sequence in sequences) > 32
    for sequence in sequences:
        if sequence.ids:
            assert_right(directory, sequence)


def test_bfloat16_is_as_accurate_as_transformers(directory: Path, backend: Backend) -> None:
    model, sequence = load(directory, backend, torch.bfloat16), PagedSequence()
    runner, ids = PagedRunner(model), random_ids(model, 60)
    runner.step((sequence, ids[:23]))
    runner.step((sequence, ids[23:50]))
    for token in ids[50:]:
        runner.step((sequence, [token]))
    exact = transformers_logits(directory, tuple(ids))
    theirs = relative_error(transformers_logits(directory, tuple(ids), torch.bfloat16), exact)
    assert relative_error(torch.stack(sequence.logits), exact) <= 1.5 * theirs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float16, 1e-2)])
def test_the_same_on_a_gpu(tiny_model: Path, dtype: torch.dtype, tolerance: float) -> None:
    model, sequences = DecoderModel.load(tiny_model, dtype, "cuda"), [PagedSequence(), PagedSequence()]
    runner, ids = PagedRunner(model), random_ids(load(tiny_model), 60)
    runner.step((sequences[0], ids[:20]), (sequences[1], ids[:1]))
    runner.step((sequences[0], ids[20:50]), (sequences[1], ids[1:2]))
    sequences.append(runner.fork(sequences[0], 37))
    runner.step((sequences[0], ids[50:51]), (sequences[1], ids[2:20]), (sequences[2], [5]))
    for sequence in sequences:
        expected = transformers_logits(tiny_model, tuple(sequence.ids))
        assert relative_error(torch.stack(sequence.logits), expected) <= tolerance


@pytest.mark.parametrize(
    "rope_scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "llama3"],
)
def test_rope_scaling(tmp_path: Path, rope_scaling: dict[str, object], backend: Backend) -> None:
    directory = write_tiny_model(tmp_path, rope_scaling=rope_scaling)
    model, sequence = load(directory, backend), PagedSequence()
    PagedRunner(model).step((sequence, random_ids(model, 150)))
    assert_right(directory, sequence)


def test_only_the_wanted_rows_get_logits(tiny_model: Path, backend: Backend) -> None:
    model = load(tiny_model, backend)
    ids = random_ids(model, 20)
    kv = PagedKV.allocate(model.config, 2, torch.float32, "cpu")
    batch = StepBatch(
        token_ids=torch.tensor(ids),
        positions=torch.arange(20),
        slots=torch.arange(20),
        query_start=[0, 20],
        seq_lens=[20],
        block_tables=torch.tensor([[0, 1]]),
        logit_rows=torch.tensor([19, 4]),
    )
    logits = model.forward(batch, kv)
    assert logits.dtype == torch.float32
    assert relative_error(logits, transformers_logits(tiny_model, tuple(ids))[[19, 4]]) <= TOLERANCE
    batch.logit_rows = torch.empty(0, dtype=torch.int64)
    assert model.forward(batch, kv).shape == (0, model.config.vocab_size)


def test_the_backends_agree_on_every_instruction_set(tiny_model: Path, cpu_isa: str) -> None:
    ids, logits = random_ids(load(tiny_model), 70), []
    for backend in ("torch", "native"):
        sequence = PagedSequence()
        runner = PagedRunner(load(tiny_model, backend))
        runner.step((sequence, ids[:50]))
        for token in ids[50:]:
            runner.step((sequence, [token]))
        logits.append(torch.stack(sequence.logits))
    assert relative_error(logits[1], logits[0]) <= TOLERANCE


def test_auto_is_native_where_the_kernels_can_compute() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    native = "torch" if _core.cpu_isas() == ["scalar"] else "native"
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_backend("auto", dtype, cpu, 64) == native
        assert choose_backend("torch", dtype, cpu, 64) == "torch"
    for dtype, device, head_dim in (
        (torch.float16, cpu, 64),
        (torch.float32, cuda, 64),
        (torch.float32, cpu, 24),
    ):
        if device.type == "cpu":
            assert choose_backend("auto", dtype, device, head_dim) == "torch"
        with pytest.raises(ConfigError, match=f"cannot compute {dtype} with heads of {head_dim} on {device}"):
            choose_backend("native", dtype, device, head_dim)


@pytest.mark.parametrize(
    ("modules", "capability", "dtype", "head_dim", "expected"),
    [
        ({"triton", "parrot._kernels"}, (9, 0), torch.float16, 128, "native"),
        ({"triton", "parrot._kernels"}, (8, 0), torch.bfloat16, 64, "native"),
        ({"triton", "parrot._kernels"}, (9, 0), torch.float16, 32, "triton"),
        ({"triton"}, (9, 0), torch.bfloat16, 128, "triton"),
        ({"triton", "parrot._kernels"}, (9, 0), torch.float32, 128, "torch"),
        ({"triton", "parrot._kernels"}, (9, 0), torch.float16, 80, "torch"),
        ({"triton", "parrot._kernels"}, (7, 5), torch.float16, 128, "torch"),
        ({"parrot._kernels"}, (9, 0), torch.float16, 128, "torch"),
    ],
)
def test_auto_on_a_gpu_is_the_first_of_native_triton_and_torch_that_can_be(
    monkeypatch: pytest.MonkeyPatch,
    modules: set[str],
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    expected: Backend,
) -> None:
    monkeypatch.setattr(backends, "_is_here", lambda module: module in modules)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert choose_backend("auto", dtype, torch.device("cuda:0"), head_dim) == expected


def test_auto_is_float32_on_a_cpu_and_a_half_on_a_gpu(tmp_path: Path) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    directory = write_tiny_model(tmp_path, dtype="bfloat16")
    assert choose_dtype("auto", cpu, directory) == torch.float32
    assert choose_dtype("auto", cuda, directory) == torch.bfloat16
    assert choose_dtype("auto", cuda, write_tiny_model(tmp_path, dtype="float32")) == torch.float16
    assert choose_dtype("bfloat16", cpu, directory) == torch.bfloat16


def test_a_backend_that_lacks_something_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_is_here", lambda _module: False)
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match="pip install triton"):
        choose_backend("triton", torch.float16, cuda, 128)
    with pytest.raises(ConfigError, match="CUDA module"):
        choose_backend("native", torch.float16, cuda, 128)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="a GPU, or TRITON_INTERPRET=1"):
        choose_backend("triton", torch.float32, torch.device("cpu"), 64)


@pytest.mark.parametrize("backend", ["auto", "native", "torch"])
def test_a_wrong_instruction_set_is_refused_by_name(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cpu_isa() -> str:
        raise ValueError('PARROT_CPU_ISA = "sse9" is none of scalar, avx2')

    monkeypatch.setattr("parrot.cpu_isa.cpu_isa", cpu_isa)
    with pytest.raises(ConfigError, match=r"sse9.*unset") as caught:
        choose_backend(backend, torch.float32, torch.device("cpu"), 64)
    assert caught.value.param == "PARROT_CPU_ISA"
