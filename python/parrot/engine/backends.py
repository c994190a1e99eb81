"""In which dtype and by whose operations a model is computed: the choice, and what each backend can do."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import Backend, DType
from ..cpu_isa import checked_cpu_isa
from ..errors import ConfigError
from ..kernels.cpu_attention import CpuAttention


@dataclass(frozen=True, slots=True)
class _Limits:
    dtypes: tuple[torch.dtype, ...]
    head_dims: frozenset[int]
    what: str
    lacking: str = ""  # what must be installed or set first

    def hold(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether it can compute this, once it is there."""
        return dtype in self.dtypes and head_dim in self.head_dims


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HALF = (torch.float16, torch.bfloat16)
_MULTIPLES_OF_16 = frozenset(range(16, 513, 16))
_POWERS_OF_2 = frozenset({16, 32, 64, 128, 256})
_BY_SPEED: tuple[Backend, ...] = ("native", "triton")  # on a GPU (docs/engine.md)
_LEAST_CAPABILITY = (8, 0)  # that the CUDA module is built for, and that computes bfloat16


def choose_dtype(requested: DType, device: torch.device, directory: Path) -> torch.dtype:
    """What was asked for, or (``auto``) float32 on a CPU and on a GPU the half that config.json names, if it
    names one, else float16."""
    if requested != "auto":
        return _DTYPES[requested]
    if device.type == "cpu":
        return torch.float32
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    written = config.get("dtype") or config.get("torch_dtype")
    return torch.bfloat16 if written == "bfloat16" else torch.float16


def choose_backend(backend: Backend, dtype: torch.dtype, device: torch.device, head_dim: int) -> Backend:
    """``native`` (on a CPU the kernels of ``csrc/kernels/cpu``; on a GPU the CUDA attention of
    ``csrc/kernels`` with Triton around it), ``triton`` (the same without nvcc) or ``torch``.

    ``auto`` is native where that is here and knows the dtype and the head size, on a CPU its vector
    instructions too; on a GPU else triton, by the same rule; else torch. Raises :class:`ConfigError`, also
    for a wrong ``PARROT_CPU_ISA``.
    """
    isa = checked_cpu_isa()
    if backend == "auto":
        if device.type == "cuda":
            return _quickest_on_gpu(dtype, device, head_dim)
        is_native = isa != "scalar" and CpuAttention.supports(head_dim, dtype, device)
        return "native" if is_native else "torch"
    if backend == "torch":
        return backend
    limits = _limits(backend, device)
    if not limits.hold(dtype, head_dim):
        raise ConfigError(
            f"backend = {backend!r} cannot compute {dtype} with heads of {head_dim} on {device}; it does "
            f"{limits.what}",
            param="backend",
        )
    if limits.lacking:
        raise ConfigError(f"backend = {backend!r} on {device} needs {limits.lacking}", param="backend")
    return backend


def _quickest_on_gpu(dtype: torch.dtype, device: torch.device, head_dim: int) -> Backend:
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "torch"
    for backend in _BY_SPEED:
        limits = _limits(backend, device)
        if limits.hold(dtype, head_dim) and not limits.lacking:
            return backend
    return "torch"


def _limits(backend: Backend, device: torch.device) -> _Limits:
    if backend == "native" and device.type == "cpu":
        return _Limits(
            (torch.float32, torch.bfloat16),
            _MULTIPLES_OF_16,
            "float32 and bfloat16 with heads of a multiple of 16 on a CPU",
        )
    lacking = "" if _is_here("triton") else "Triton: pip install triton"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            lacking = "a GPU, or TRITON_INTERPRET=1 for a slow computation that is the same"
        return _Limits(
            (torch.float32, torch.float16), _POWERS_OF_2, "float32 and float16 in its interpreter", lacking
        )
    if backend == "triton":
        return _Limits(_HALF, _POWERS_OF_2, "float16 and bfloat16 with heads of a power of 2", lacking)
    if not _is_here("parrot._kernels"):
        lacking = "the CUDA module, which is built where nvcc is found; or take backend = 'triton'"
    return _Limits(_HALF, frozenset({64, 128}), "float16 and bfloat16 with heads of 64 or 128", lacking)


def _is_here(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
