"""The step loop of a GPU: one upload, padded sizes, recorded decodes. In Triton's interpreter on the CPU a
replay computes anew on the same buffers; on a GPU (``-m gpu``) it is a CUDA graph."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine_harness import Harness, prompt_of
from parrot.config import Backend
from parrot.engine.batch import StepBatch
from parrot.engine.engine import Engine
from parrot.engine.graphs import (
    Compute,
    CudaGraphRecorder,
    EagerRecorder,
    Recorder,
    Recording,
    decode_sizes,
)
from parrot.engine.model import DecoderModel
from parrot.engine.overlap import OverlappingEngine
from parrot.engine.runner import ModelRunner
from parrot.engine.sampling import OutputState, Sampler
from parrot.kernels.draws import DRAW
from parrot.kernels.gpu_ops import GpuOps
from parrot.kernels.ops import StepLimits
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import EngineStats, Sampling
from tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("tall_tiles")
LIMITS = StepLimits(rows=64, sequences=12, blocks=8)
NUM_BLOCKS = 64


@dataclass(frozen=True)
class Place:
    """Where the tests run."""

    device: torch.device
    dtype: torch.dtype
    tolerance: float
    backend: Backend = "triton"
    head_dim: int = 16

    def runner(self, directory: Path, *, recorded: bool, num_blocks: int = NUM_BLOCKS) -> ModelRunner:
        model = DecoderModel.load(directory, self.dtype, self.device, self.backend)
        recorder: Recorder | None = None
        if recorded:
            recorder = CudaGraphRecorder(self.device) if self.device.type == "cuda" else EagerRecorder()
        return ModelRunner(model, num_blocks, self.dtype, self.device, limits=LIMITS, recorder=recorder)

    def reference(self, directory: Path) -> ModelRunner:
        """The quickest that records nothing."""
        if self.device.type == "cuda":
            return self.runner(directory, recorded=False)
        model = DecoderModel.load(directory, self.dtype, self.device)
        return ModelRunner(model, NUM_BLOCKS, self.dtype, self.device)


def _places() -> list[object]:
    if torch.cuda.is_available():
        gpu = Place(torch.device("cuda:0"), torch.float16, 1e-2)
        places: list[object] = [pytest.param(gpu, id="triton", marks=pytest.mark.gpu)]
        if importlib.util.find_spec("parrot._kernels") is not None:
            native = replace(gpu, backend="native", head_dim=64)
            places.append(pytest.param(native, id="native", marks=pytest.mark.gpu))
        return places
    return [pytest.param(Place(torch.device("cpu"), torch.float32, 1e-5), id="interpreter")]


@pytest.fixture(scope="module", params=_places())
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


@pytest.fixture(scope="module")
def tiny(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few heads: the interpreter takes its time."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_model(directory, num_heads=2, num_kv_heads=1, head_dim=place.head_dim)


def decodes(lengths: list[int], shared_blocks: int, seed: int) -> StepBatch:
    """One row for each of sequences of these lengths, which have their first blocks in common and the others
    for themselves, in shuffled pages."""
    rng = random.Random(seed)
    pages = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    shared = [pages.pop() for _ in range(shared_blocks)]
    tables = torch.full((len(lengths), LIMITS.blocks), -1)
    for row, length in enumerate(lengths):
        num_blocks = -(-length // 16)
        own = [pages.pop() for _ in range(max(0, num_blocks - shared_blocks))]
        tables[row, :num_blocks] = torch.tensor([*shared, *own][:num_blocks])
    positions = torch.tensor(lengths) - 1
    blocks = tables[torch.arange(len(lengths)), positions // 16]
    return StepBatch(
        token_ids=torch.tensor([rng.randrange(3, 256) for _ in lengths]),
        positions=positions,
        slots=blocks * 16 + positions % 16,
        query_start=list(range(len(lengths) + 1)),
        seq_lens=lengths,
        block_tables=tables,
        logit_rows=torch.arange(len(lengths)),
    )


def fill(runner: ModelRunner, seed: int) -> None:
    """The same pages for every runner with as many blocks of its own."""
    generator = torch.Generator().manual_seed(seed)
    for cache in (*runner.kv.k, *runner.kv.v):
        values = torch.randn(NUM_BLOCKS, *cache.shape[1:], generator=generator)
        cache[:NUM_BLOCKS] = values.to(cache)
        cache[NUM_BLOCKS:] = nan


def test_warming_up_also_compiles_what_decodes_do_not_launch(
    place: Place, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(GpuOps, "compile_prefill", lambda _, pages: compiled.append(pages))
    runner = place.runner(tiny, recorded=True)
    assert runner.graphs is not None
    runner.graphs.warm_up()
    assert compiled == [runner.kv]


def test_sizes_are_those_that_rows_are_padded_to() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(12) == [1, 2, 4, 8, 12]
    assert decode_sizes(32) == [1, 2, 4, 8, 16, 24, 32]


def test_a_replay_on_another_tree_is_the_unpadded_step(place: Place, tiny: Path) -> None:
    recorded = place.runner(tiny, recorded=True)
    eager = place.runner(tiny, recorded=False)
    assert recorded.graphs is not None
    addresses: dict[int, list[int]] = {}
    for n, shared, seed in [
        (1, 1, 1),
        (3, 2, 2),
        (4, 0, 3),
        (5, 1, 4),
        (9, 0, 5),
        (12, 2, 6),
        (3, 0, 7),
        (6, 2, 8),
    ]:
        lengths = [random.Random(seed + i).randrange(16 * shared + 1, 16 * shared + 40) for i in range(n)]
        batch = decodes(lengths, shared, seed)
        for runner in (recorded, eager):
            fill(runner, seed)
        expected = eager.compute(batch)
        logits, likeliest, _ = recorded.compute(batch)
        assert likeliest is not None
        torch.testing.assert_close(logits, expected.logits, rtol=place.tolerance, atol=place.tolerance)
        assert likeliest.tolist() == logits.argmax(dim=1).tolist()
        size = min(size for size in recorded.graphs.sizes if size >= n)
        where = [logits.data_ptr(), likeliest.data_ptr()]
        assert addresses.setdefault(size, where) == where
        for mine, theirs in zip(recorded.kv.k, eager.kv.k, strict=True):  # what it wrote, and nothing else
            torch.testing.assert_close(mine[:NUM_BLOCKS], theirs, rtol=place.tolerance, atol=place.tolerance)
    assert set(addresses) == {1, 4, 8, 12}
    assert recorded.num_shared_decodes == eager.num_shared_decodes


def test_a_row_that_is_not_finite_is_found_and_harms_no_other(place: Place, tiny: Path) -> None:
    runner = place.runner(tiny, recorded=True)
    fill(runner, 0)
    batch = decodes([20, 30, 17], 0, 3)
    first = runner.compute(batch).likeliest
    assert first is not None
    expected = first.tolist()
    for cache in runner.kv.v:
        cache[int(batch.block_tables[1, 0])] = nan
    logits, likeliest, _ = runner.compute(batch)
    assert likeliest is not None
    assert likeliest.tolist() == [expected[0], -1, expected[2]]
    assert torch.isfinite(logits[[0, 2]]).all()


def test_a_step_that_wants_few_logits_gets_those(place: Place, tiny: Path) -> None:
    runner = place.runner(tiny, recorded=True)
    fill(runner, 1)
    batch = decodes([20, 30, 17], 1, 3)
    every = runner.compute(batch).logits.clone()
    batch.logit_rows = torch.tensor([2, 0])
    torch.testing.assert_close(runner.compute(batch).logits, every[[2, 0]], rtol=0, atol=0)


def test_a_step_over_the_limits_is_refused(place: Place, tiny: Path) -> None:
    runner = place.runner(tiny, recorded=True)
    with pytest.raises(ValueError, match=r"sequences=13.*sequences=12"):
        runner.compute(decodes([5] * 13, 0, 1))


def generate(
    runner: ModelRunner, directory: Path, engine_type: type[Engine] = Engine
) -> tuple[list[list[int]], EngineStats]:
    """What four calls give, of which one forks off another inside a block while that one decodes, and one
    comes later still."""
    limits = {"max_batch_tokens": 24, "max_batch_size": LIMITS.sequences}
    harness = Harness(runner, Tokenizer.load(directory), engine_type=engine_type, **limits)
    first = prompt_of(29, seed=1)
    calls = [harness.submit(first, max_tokens=9), harness.submit(prompt_of(13, seed=2), max_tokens=9)]
    for _ in range(3):
        harness.step()
    calls.append(harness.submit([*first[:27], 77], max_tokens=4))
    harness.step()
    calls.append(harness.submit(prompt_of(20, seed=3), max_tokens=2))
    return [result.ids for result in harness.run(*calls)], harness.engine.stats()


def test_forks_preemptions_mixed_and_overlapping_steps_generate_the_same_ids(
    place: Place, tiny: Path
) -> None:
    expected, _ = generate(place.reference(tiny), tiny)
    ids, stats = generate(place.runner(tiny, recorded=True), tiny)
    assert ids == expected
    assert stats.cow_copies > 0
    ids, stats = generate(place.runner(tiny, recorded=True, num_blocks=4), tiny, OverlappingEngine)
    assert ids == expected
    assert stats.preemptions > 0


MIXED = [
    {"temperature": 0.9, "seed": 1},
    {},
    {"temperature": 1.2, "top_p": 0.8, "seed": 2},
    {"temperature": 0.7, "top_k": 9, "min_p": 0.05, "seed": 3},
    {"temperature": 1.0, "presence_penalty": 1.0, "seed": 4},
]


@pytest.mark.parametrize("kinds", [MIXED[:1], MIXED])
def test_ids_drawn_in_a_recorded_step_are_those_drawn_behind_it(
    place: Place, tiny: Path, kinds: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row each that is drawn, greedy, truncated, and shaped, whose ids the step does not choose."""

    def ids(runner: ModelRunner) -> list[list[int]]:
        harness = Harness(
            runner, Tokenizer.load(tiny), engine_type=OverlappingEngine, max_batch_size=LIMITS.sequences
        )
        calls = [
            harness.submit(prompt_of(9 + i, seed=i), max_tokens=6, **kind) for i, kind in enumerate(kinds)
        ]
        return [result.ids for result in harness.run(*calls)]

    expected = ids(place.reference(tiny))
    behind = []
    sampler_draw = Sampler._draw
    monkeypatch.setattr(Sampler, "_draw", lambda self, *a: behind.append(a) or sampler_draw(self, *a))
    assert ids(place.runner(tiny, recorded=True)) == expected
    assert len(behind) <= 2, "a decode was drawn behind its step"
    assert len({tuple(each) for each in expected}) == len(kinds)


def test_a_recorded_step_draws_the_ids_of_the_reference(place: Place, tiny: Path) -> None:
    """The ids of the step itself, which a place without a GPU draws once more behind it."""
    runner = place.runner(tiny, recorded=True)
    kinds = [Sampling(**kind) for kind in MIXED[:4]] * 3  # type: ignore[arg-type]
    seeded = [msgspec.structs.replace(kind, seed=i) for i, kind in enumerate(kinds)]
    nothing = np.empty(0, np.int32)
    states = [OutputState(kind, 0, nothing, frozenset(), constrained=False) for kind in seeded]
    sampler, num_drawn = Sampler(), 0
    for seed in range(2):
        fill(runner, seed)
        rows = 12 if seed % 2 else 7
        batch = decodes([20 + i for i in range(rows)], 1, seed)
        positions = [100 * seed + i for i in range(rows)]
        batch.draws = sampler.draws(states[:rows], positions)
        logits, likeliest, drawn = runner.compute(batch)
        assert drawn is not None
        assert likeliest is not None
        expected = Sampler().sample(logits.cpu(), states[:rows], positions)
        assert drawn.tolist() == expected
        num_drawn += sum(int(a != b) for a, b in zip(expected, likeliest.tolist(), strict=True))
    assert num_drawn > 4, "ids that are not the likeliest"


def test_draws_of_other_rows_than_those_of_the_step_are_left_to_the_sampler(place: Place, tiny: Path) -> None:
    runner = place.runner(tiny, recorded=True)
    fill(runner, 1)
    batch = decodes([20, 30, 17], 1, 3)
    batch.draws = np.zeros(2, dtype=DRAW)
    batch.draws["scale"] = 1.0
    assert runner.compute(batch).drawn is None


def test_a_recording_that_fails_leaves_a_runner_that_computes(place: Place, tiny: Path) -> None:
    class NoMemory:
        def record(self, compute: Compute) -> Recording:
            raise torch.OutOfMemoryError(f"no memory for {compute}")

    model = DecoderModel.load(tiny, place.dtype, place.device, place.backend)
    runner = ModelRunner(model, NUM_BLOCKS, place.dtype, place.device, limits=LIMITS, recorder=NoMemory())
    eager = place.runner(tiny, recorded=False)
    batch = decodes([20, 3], 0, 3)
    for each in (runner, eager):
        fill(each, 0)
    tolerance = {"rtol": place.tolerance, "atol": place.tolerance}
    torch.testing.assert_close(runner.compute(batch).logits, eager.compute(batch).logits, **tolerance)
