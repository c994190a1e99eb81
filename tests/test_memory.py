"""The size of the KV pool from free memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parrot.engine import memory
from parrot.engine.model_config import ModelConfig
from parrot.errors import SetupError


@pytest.fixture
def config(tiny_model: Path) -> ModelConfig:
    return ModelConfig.load(tiny_model)


def blocks(config: ModelConfig) -> int:
    return memory.choose_num_blocks(config, torch.float32, torch.device("cpu"))


def test_this_machine_has_memory_for_the_tiny_model(config: ModelConfig) -> None:
    assert memory.available_memory() > 0
    assert blocks(config) == memory.MAX_CPU_TOKENS // 16


def test_a_quarter_of_what_is_free_is_used(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 16 * config.kv_bytes_per_token(torch.float32)
    monkeypatch.setattr(memory, "available_memory", lambda: 400 * block_bytes)
    assert blocks(config) == 100


def test_a_pool_larger_than_memory_is_refused_with_its_size(config: ModelConfig) -> None:
    cpu = torch.device("cpu")
    assert memory.choose_num_blocks(config, torch.float32, cpu, 5) == 5
    with pytest.raises(SetupError, match=r"num_blocks = 2000000000: .* GiB of KV cache do not fit"):
        memory.choose_num_blocks(config, torch.float32, cpu, 2 * 10**9)


def test_too_little_memory_is_an_error_with_the_numbers(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2**18)
    with pytest.raises(SetupError, match="free memory on cpu hold 8 KV blocks"):
        blocks(config)


def test_what_torch_only_keeps_in_store_counts_as_free(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 16 * config.kv_bytes_per_token(torch.float16)
    free = [100 * block_bytes]  # beside what a model of this process before has left
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(1000 * block_bytes))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free[-1], 2000 * block_bytes))
    assert memory.choose_num_blocks(config, torch.float16, torch.device("cuda:0")) == 850


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    assert memory._cgroup_available(tmp_path) == 2**62
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_available(tmp_path) == 2**62
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert memory._cgroup_available(tmp_path) == 600


@pytest.mark.parametrize(
    ("gigabytes", "expected"), [(140, (256, 16384)), (40, (256, 4096)), (16, (128, 2048)), (None, (64, 512))]
)
def test_the_limits_of_a_step_suit_the_device_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int | None, expected: tuple[int, int]
) -> None:
    device = torch.device("cpu" if gigabytes is None else "cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (0, (gigabytes or 0) * 2**30))
    assert memory.choose_batch(device, None, None) == expected
    assert memory.choose_batch(device, 3, None) == (3, expected[1])
    assert memory.choose_batch(device, None, 77) == (expected[0], 77)
