"""Every family of models through the whole engine: chunks, forks of a shared prefix and preemption."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_harness import Harness, prompt_of
from parrot.config import Backend
from parrot.engine.model import DecoderModel
from parrot.gguf_model import convert_gguf
from parrot.tokenizer.tokenizer import Tokenizer
from tiny_gguf import write_gguf
from tiny_models import FAMILIES, write_family

NUM_CALLS, MAX_TOKENS = 8, 30


@pytest.fixture(scope="module", params=["llama", "llama-tied", *FAMILIES])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as transformers reads it."""
    name: str = request.param
    if name in FAMILIES:
        return write_family(tmp_path_factory.mktemp(name) / "model", name)
    path: Path = request.getfixturevalue("tiny_model" if name == "llama" else "tiny_mha_model")
    return path


@pytest.fixture(scope="module")
def theirs(source: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_calls_that_are_cut_forked_and_preempted_have_the_logits_of_transformers(
    source: Path, theirs: torch.nn.Module, backend: Backend
) -> None:
    check(source, theirs, backend)


@pytest.mark.parametrize("source", ["llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3"], indirect=True)
def test_a_model_from_gguf_has_the_logits_of_its_original(
    source: Path, theirs: torch.nn.Module, tmp_path: Path
) -> None:
    architecture = json.loads((source / "config.json").read_text())["model_type"]
    path = write_gguf(tmp_path / "model.gguf", source, architecture=architecture)
    converted = tmp_path / "converted"
    converted.mkdir()
    convert_gguf(path, converted, lambda _what, _fraction: None)
    check(converted, theirs, "native")


def check(directory: Path, theirs: torch.nn.Module, backend: Backend) -> None:
    """Eight calls that share a prefix in a pool for three."""
    model = DecoderModel.load(directory, torch.float32, torch.device("cpu"), backend)
    harness = Harness(model, Tokenizer.load(directory), num_blocks=14, max_batch_tokens=24)
    shared = prompt_of(37)
    prompts = [[*shared, *prompt_of(5 + i, seed=i)] for i in range(NUM_CALLS)]
    calls = [harness.submit(prompt, max_tokens=MAX_TOKENS, logprobs=3) for prompt in prompts]
    results = harness.run(*calls)
    stats = harness.engine.stats()
    assert min(stats.preemptions, stats.forks, stats.cow_copies) > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.error is None, result.error
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + result.ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        assert result.ids == expected.argmax(-1).tolist()
        said = result.outputs[0].logprobs
        assert said is not None
        values = np.frombuffer(said.top_values, "<f4").reshape(MAX_TOKENS, 3)
        assert values == pytest.approx(expected.topk(3).values.numpy(), abs=2e-4)
