"""Every family of models through the whole engine: chunks, forks of a shared prefix and preemption."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_harness import Harness, prompt_of
from parrot.config import Backend
from parrot.engine.engine import Engine
from parrot.engine.graphs import CudaGraphRecorder
from parrot.engine.model import DecoderModel
from parrot.engine.overlap import OverlappingEngine
from parrot.engine.runner import ModelRunner
from parrot.gguf_model import convert_gguf
from parrot.kernels.ops import StepLimits
from parrot.tokenizer.tokenizer import Tokenizer
from tiny_gguf import write_gguf
from tiny_models import FAMILIES, write_family, write_tiny_model

ROPES = {
    "llama-linear": {"rope_type": "linear", "factor": 4.0},
    "llama-3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
NUM_CALLS, MAX_TOKENS = 8, 30
TOLERANCES = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}  # of logprobs, relative


@pytest.fixture(scope="module", params=["llama", "llama-tied", *ROPES, *FAMILIES])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as transformers reads it."""
    name: str = request.param
    if name in FAMILIES:
        return write_family(tmp_path_factory.mktemp(name) / "model", name)
    if name in ROPES:
        return write_tiny_model(tmp_path_factory.mktemp(name) / "model", rope_scaling=ROPES[name])
    path: Path = request.getfixturevalue("tiny_model" if name == "llama" else "tiny_mha_model")
    return path


@pytest.fixture(scope="module")
def theirs(source: Path) -> torch.nn.Module:
    return transformers_model(source)


def transformers_model(directory: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize(("backend", "engine_type"), [("torch", Engine), ("native", OverlappingEngine)])
def test_calls_that_are_cut_forked_and_preempted_have_the_logits_of_transformers(
    source: Path, theirs: torch.nn.Module, backend: Backend, engine_type: type[Engine]
) -> None:
    check(runner(source, backend), source, theirs, engine_type)


@pytest.mark.parametrize("source", ["llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3"], indirect=True)
def test_a_model_from_gguf_has_the_logits_of_its_original(
    source: Path, theirs: torch.nn.Module, tmp_path: Path
) -> None:
    architecture = json.loads((source / "config.json").read_text())["model_type"]
    path = write_gguf(tmp_path / "model.gguf", source, architecture=architecture)
    converted = tmp_path / "converted"
    converted.mkdir()
    convert_gguf(path, converted, lambda _what, _fraction: None)
    check(runner(converted, "native"), converted, theirs, Engine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_same_on_a_gpu_with_decodes_recorded(
    source: Path, theirs: torch.nn.Module, backend: Backend, dtype: torch.dtype
) -> None:
    check(runner(source, backend, dtype, torch.device("cuda:0")), source, theirs, OverlappingEngine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_the_same_with_the_attention_of_the_cuda_module(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    wide = write_family(tmp_path / "wide", family, head_dim=64)  # heads of 16 are not for it
    on_gpu = runner(wide, "native", dtype, torch.device("cuda:0"))
    check(on_gpu, wide, transformers_model(wide), OverlappingEngine)


def runner(
    directory: Path,
    backend: Backend,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> ModelRunner:
    """With a pool for three of the calls."""
    model = DecoderModel.load(directory, dtype, device, backend)
    is_recorded = device.type == "cuda" and backend != "torch"
    return ModelRunner(
        model,
        14,
        dtype,
        device,
        limits=StepLimits(rows=24, sequences=NUM_CALLS, blocks=8) if is_recorded else None,
        recorder=CudaGraphRecorder(device) if is_recorded else None,
    )


def check(runner: ModelRunner, directory: Path, theirs: torch.nn.Module, engine_type: type[Engine]) -> None:
    """Calls that share a prefix: first those that may be computed ahead, then some with log-probabilities,
    which may not."""
    harness = Harness(
        runner,
        Tokenizer.load(directory),
        max_batch_size=NUM_CALLS,
        max_batch_tokens=24,
        engine_type=engine_type,
    )
    shared, tolerance = prompt_of(37), TOLERANCES[runner.dtype]
    prompts = [[*shared, *prompt_of(5 + i, seed=i)] for i in range(NUM_CALLS)]
    asked = [None] * 4 + [3] * (NUM_CALLS - 4)
    calls = [
        harness.submit(prompt, max_tokens=MAX_TOKENS, logprobs=number)
        for prompt, number in zip(prompts, asked, strict=True)
    ]
    results = harness.run(*calls)
    stats = harness.engine.stats()
    assert min(stats.preemptions, stats.forks, stats.cow_copies) > 0
    for prompt, number, result in zip(prompts, asked, results, strict=True):
        assert result.error is None, result.error
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + result.ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        best = expected.topk(3).values.numpy()
        chosen = expected[torch.arange(MAX_TOKENS), torch.tensor(result.ids)].numpy()
        assert (best[:, 0] - chosen).max() <= 10 * tolerance  # a likeliest id, but for near ties
        if number is not None:
            said = result.outputs[0].logprobs
            assert said is not None
            ours = np.frombuffer(said.top_values, "<f4").reshape(MAX_TOKENS, 3)
            assert np.linalg.norm(ours - best) <= tolerance * np.linalg.norm(best)
