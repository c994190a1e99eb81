"""How many KV blocks fit into free memory."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from ..errors import SetupError
from .batch import BLOCK_SIZE
from .model_config import ModelConfig

MAX_CPU_TOKENS = 65_536
_CPU_SHARE = 0.25  # of available memory: the machine has other tenants
_CUDA_SHARE = 0.85  # of free memory: the rest is for activations
_MIN_BLOCKS = 16
_CPU_BATCH = (64, 512)  # sequences and tokens of a step
_GPU_BATCHES = ((64, 256, 16384), (24, 256, 4096), (0, 128, 2048))  # from so many GiB on


def choose_num_blocks(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, requested: int | None = None
) -> int:
    """Blocks for one engine, ``requested`` of them if given; call it once the weights are loaded.

    Raises :class:`SetupError` if hardly any fit, or fewer than requested. (Where the system promises more
    memory than it has, a pool too large would otherwise be allocated, and the process killed on its use.)
    """
    block_bytes = BLOCK_SIZE * config.kv_bytes_per_token(dtype)
    if requested is not None:
        if device.type == "cpu" and requested * block_bytes > (available := available_memory()):
            raise SetupError(
                f"num_blocks = {requested}: {requested * block_bytes / 2**30:.1f} GiB of KV cache do not fit "
                f"into {available / 2**30:.1f} GiB of free memory; give fewer, or none to have them sized",
                param="num_blocks",
            )
        return requested
    if device.type == "cuda":
        gc.collect()  # what loading left behind, or a model of this process before, is no use to anybody
        torch.cuda.empty_cache()
        available = torch.cuda.mem_get_info(device)[0]
        num_blocks = int(available * _CUDA_SHARE) // block_bytes
    else:
        available = available_memory()
        num_blocks = min(int(available * _CPU_SHARE) // block_bytes, MAX_CPU_TOKENS // BLOCK_SIZE)
    if num_blocks < _MIN_BLOCKS:
        raise SetupError(
            f"{available / 2**20:.0f} MiB of free memory on {device} hold {num_blocks} KV blocks of "
            f"{block_bytes / 2**20:.1f} MiB, at least {_MIN_BLOCKS} are needed; free memory or set num_blocks"
        )
    return num_blocks


def choose_batch(device: torch.device, size: int | None, tokens: int | None) -> tuple[int, int]:
    """Sequences and tokens of a step at most: those that were asked for, else what suits the device. A GPU
    with much memory has the activations of long chunks beside the KV of many sequences, and needs both to be
    busy."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        usual = next(batch[1:] for batch in _GPU_BATCHES if total >= batch[0] * 2**30)
    else:
        usual = _CPU_BATCH
    return size or usual[0], tokens or usual[1]


def available_memory() -> int:
    """Bytes that this process can take without swapping, its control group's limit included."""
    return min(_meminfo_available(), _cgroup_available())


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62


def _cgroup_available(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Room under the memory limit of a container; unlimited if there is none."""
    try:
        limit = (root / "memory.max").read_text().strip()
        return 2**62 if limit == "max" else max(0, int(limit) - int((root / "memory.current").read_text()))
    except (OSError, ValueError):
        return 2**62
