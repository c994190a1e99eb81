"""The paged KV cache's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parrot.engine.batch import PagedKV
from parrot.engine.model import LlamaModel
from parrot.errors import SetupError


def test_a_cache_larger_than_memory_is_refused_with_its_size(tiny_model: Path) -> None:
    model = LlamaModel.load(tiny_model, torch.float32, "cpu")
    with pytest.raises(SetupError, match=r"num_blocks = 2000000000: .* GiB of KV cache cannot be allocated"):
        PagedKV.allocate(model.config, 2 * 10**9, torch.float32, "cpu")
