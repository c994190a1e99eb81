"""Checks of the tensors that go to a kernel as addresses: what does not fit is named before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_AS_IT_IS = nullcontext()
_ALIGNMENT = 16  # bytes that a kernel reads at once
_LARGEST_SCALE = torch.finfo(torch.float32).max / 2


def check_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise TypeError unless ``value`` is of one of ``kinds``, which the message calls ``expected``."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is of type {type(value).__name__}, expected {expected}")


def check_scale(scale: object) -> None:
    """Raise ValueError unless ``scale`` is a number that stays finite in float32 and base 2."""
    if not isinstance(scale, Real) or not abs(float(scale)) <= _LARGEST_SCALE:
        raise ValueError(f"scale is {scale!r}, expected a finite number")


def with_index(device: torch.device | str) -> torch.device:
    """The device as the tensors on it name it: ``cuda`` alone is the current GPU, ``cuda:0`` say."""
    device = torch.device(device)
    if device.type != "cuda":
        return device
    return torch.empty(0, device=device).device  # asked of torch: its type says that there is always an index


def check_is_gpu(device: torch.device) -> None:
    """Raise ValueError unless ``device`` is a GPU."""
    if device.type != "cuda":
        raise ValueError(f"device is {device}, expected a CUDA GPU")


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device``, with its number, the current one meanwhile if it is another: kernels are launched on
    the current GPU, wherever their tensors are."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _AS_IT_IS
    return torch.cuda.device(device)


def fits(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all checks of :func:`check_tensor` would pass: a call on each layer's path."""
    return (
        tensor.shape == shape
        and tensor.dtype == dtype
        and tensor.device == device
        and tensor.is_contiguous()
        and tensor.data_ptr() % _ALIGNMENT == 0
        and _has_memory(tensor)
    )


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError that names the axis and both values unless ``tensor`` fits; TypeError for none."""
    check_type(name, tensor, Tensor, "torch.Tensor")
    if fits(tensor, shape, dtype, device):
        return
    check_shape(name, tensor, shape)
    check_dtype(name, tensor, (dtype,))
    check_device(name, tensor, device)
    check_layout(name, tensor)


def check_axes(name: str, tensor: Tensor, num_axes: int) -> None:
    """Raise ValueError unless ``tensor`` has so many axes, TypeError for what is none."""
    check_type(name, tensor, Tensor, "torch.Tensor")
    if tensor.dim() != num_axes:
        raise ValueError(f"{name} has {tensor.dim()} axes {tuple(tensor.shape)}, expected {num_axes}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless ``tensor`` has ``shape``."""
    check_axes(name, tensor, len(shape))
    for axis, (size, expected) in enumerate(zip(tensor.shape, shape, strict=True)):
        if size != expected:
            raise ValueError(f"{name} axis {axis} is {size}, expected {expected}")


def check_layout(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless ``tensor`` is contiguous, begins at a multiple of 16 bytes and has memory."""
    expected = 1
    for axis in range(tensor.dim() - 1, -1, -1):
        if tensor.stride(axis) != expected and tensor.shape[axis] > 1:
            raise ValueError(f"{name} axis {axis} has stride {tensor.stride(axis)}, expected {expected}")
        expected *= tensor.shape[axis]
    if tensor.data_ptr() % _ALIGNMENT:
        offset = tensor.data_ptr() % _ALIGNMENT
        raise ValueError(f"{name} begins {offset} bytes past a multiple of {_ALIGNMENT}, expected 0")
    if not _has_memory(tensor):
        raise ValueError(f"{name} has a storage of 0 bytes, expected {tensor.nbytes}")


def _has_memory(tensor: Tensor) -> bool:
    """False for one whose storage was taken from it."""
    return tensor.data_ptr() != 0 or tensor.numel() == 0


def check_dtype(name: str, tensor: Tensor, expected: Sequence[torch.dtype]) -> None:
    """Raise ValueError unless ``tensor`` has one of the dtypes ``expected``, TypeError for what is none."""
    check_type(name, tensor, Tensor, "torch.Tensor")
    if tensor.dtype not in expected:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, expected))}")


def check_device(name: str, tensor: Tensor, expected: torch.device) -> None:
    """Raise ValueError unless ``tensor`` is on the device ``expected``."""
    if tensor.device != expected:
        raise ValueError(f"{name} is on {tensor.device}, expected {expected}")


def check_int32(name: str, array: npt.NDArray[np.int32], num_axes: int) -> None:
    """Raise ValueError unless ``array`` is a contiguous array of int32 with ``num_axes`` axes, TypeError
    unless it is one of numpy's."""
    check_type(name, array, np.ndarray, "numpy.ndarray")
    if array.dtype != np.int32:
        raise ValueError(f"{name} is {array.dtype}, expected int32")
    if array.ndim != num_axes:
        raise ValueError(f"{name} has {array.ndim} axes {array.shape}, expected {num_axes}")
    if not array.flags.c_contiguous:
        wanted = np.empty(array.shape, np.int32).strides
        axis = next(a for a in range(num_axes) if array.strides[a] != wanted[a])
        stride, expected = array.strides[axis], wanted[axis]
        raise ValueError(f"{name} axis {axis} has a stride of {stride} bytes, expected {expected}")
