"""Fixtures that many test files share: model directories, real and tiny."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: tests share few cores, and tiny models gain nothing
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton: kernels run on the CPU, slowly

import pytest
from hypothesis import HealthCheck, settings

from parrot import _core
from parrot.errors import ModelPackageMissing
from parrot.models import resolve_model
from tiny_models import write_tiny_model

# How fast this machine draws examples is no property of the code: the first draw of a fresh checkout builds
# a table of all Unicode characters, a second or more on a busy machine.
# And the same examples every time: one that fails once in ten thousand is to be found by a search
# (HYPOTHESIS_PROFILE=search), which keeps what it found, and not by whoever happens to run the tests next.
common: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("parrot", derandomize=True, **common)
settings.register_profile("search", **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "parrot"))


@pytest.fixture
def garbage_at_rest() -> Iterator[None]:
    """As in a service, nothing collects by itself: in a process that has run many tests one collection takes
    longer than what a test of turns may find."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random two-layer LLaMA with grouped-query attention, byte-level BPE and a ChatML template."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_mha_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one KV head for each head and tied embeddings."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-mha", num_kv_heads=4, tied=True, seed=1)


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with many layers: a long call is not over before a busy test process comes to stop it."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "slow", num_layers=8)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct, converted into the cache on first use."""
    try:
        return resolve_model("smollm2")
    except ModelPackageMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def tall_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, which takes its time for each program, products of one row have few."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from parrot.kernels import triton_linear

        monkeypatch.setattr(triton_linear, "row_tiling", lambda *_, **__: (64, 256, 4))


@pytest.fixture(params=_core.cpu_isas())
def cpu_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that the CPU kernels have and this machine can run; in use during the test."""
    _core.set_cpu_isa(request.param)
    yield request.param
    _core.set_cpu_isa("")


@pytest.fixture(autouse=True)
def pools_are_whole() -> Iterator[None]:
    """After every test, the KV caches of the engines that it made keep their invariant."""
    yield
    harness = sys.modules.get("engine_harness")
    if harness is not None:
        harness.check_pools()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "smollm2_dir" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)
