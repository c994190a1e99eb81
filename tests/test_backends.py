"""Whole calls through a real engine: greedy outputs do not depend on the backend, nor on how it shares."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.splits import NEAR_TIE

from engine_harness import Harness, Result
from paged_sequences import PagedRunner, PagedSequence
from parrot import _core
from parrot.config import Backend
from parrot.engine.model import DecoderModel
from parrot.tokenizer.tokenizer import Tokenizer


def run_calls(directory: Path, backend: Backend, *, share_prefixes: bool = True) -> list[Result]:
    """Two groups of calls with a common prefix each, strangers, and more prompt than one step takes."""
    model = DecoderModel.load(directory, torch.float32, "cpu", backend, share_prefixes=share_prefixes)
    harness = Harness(model, Tokenizer.load(directory), num_blocks=200, max_batch_tokens=96)
    rng = random.Random(5)
    prefixes = [[rng.randrange(3, 500) for _ in range(length)] for length in (130, 77, 0)]
    calls = []
    for i in range(12):
        own = [rng.randrange(3, 500) for _ in range(rng.randint(1, 40))]
        calls.append(harness.submit(prefixes[i % 3] + own, max_tokens=rng.randint(5, 30)))
    return harness.run(*calls)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    return [result.ids for result in run_calls(tiny_model, "torch")]


def test_native_and_torch_generate_the_same(
    tiny_model: Path, expected: list[list[int]], cpu_isa: str
) -> None:
    assert [result.ids for result in run_calls(tiny_model, "native")] == expected


def test_reading_a_shared_prefix_once_changes_nothing(tiny_model: Path, expected: list[list[int]]) -> None:
    results = run_calls(tiny_model, "native", share_prefixes=False)
    assert [result.ids for result in results] == expected


def test_the_number_of_threads_changes_nothing(tiny_model: Path, expected: list[list[int]]) -> None:
    before = torch.get_num_threads(), _core.cpu_threads()
    torch.set_num_threads(3)  # attention's
    _core.set_cpu_threads(3)
    try:
        assert [result.ids for result in run_calls(tiny_model, "native")] == expected
    finally:
        torch.set_num_threads(before[0])
        _core.set_cpu_threads(before[1])


def top2_gap(model: DecoderModel, ids: list[int]) -> float:
    """Between the two largest logits after ``ids``."""
    sequence = PagedSequence()
    PagedRunner(model).step((sequence, ids))
    first, second = torch.topk(sequence.logits[-1], 2).values.tolist()
    return float(first - second)


@pytest.mark.model
def test_the_real_model_writes_the_same_but_for_near_ties(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_dir)
    texts = ("The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4,")
    prompts = [tokenizer.encode(text).tolist() for text in texts]
    torch_model, native_model = (
        DecoderModel.load(smollm2_dir, torch.float32, "cpu", backend) for backend in ("torch", "native")
    )
    written = []
    for model in (torch_model, native_model):
        harness = Harness(model, tokenizer, num_blocks=32)
        results = harness.run(*[harness.submit(prompt, max_tokens=16) for prompt in prompts])
        written.append([prompt + result.ids for prompt, result in zip(prompts, results, strict=True)])
    for ours, theirs in zip(written[1], written[0], strict=True):
        parting = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        assert parting is None or top2_gap(torch_model, theirs[:parting]) < NEAR_TIE


IDLE = """
import sys, time
from parrot.engine.process import set_passive_waits
set_passive_waits()
import torch
from parrot import _core
torch.set_num_threads(2)
_core.set_cpu_threads(2)
from pathlib import Path
from test_backends import run_calls
run_calls(Path(sys.argv[1]), "native")
torch.rand(2000, 2000).exp()  # torch's own threads have worked too
before = time.process_time()
time.sleep(1)
print(time.process_time() - before)
"""


def test_threads_of_an_idle_engine_sleep(tiny_model: Path) -> None:
    preload = "import tests.native_build\n" if "PARROT_CORE" in os.environ else ""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", preload + IDLE, str(tiny_model)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 0.2  # one thread that spins takes a second
