"""Checks of the tensors that go to a kernel as addresses: what does not fit is named before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_AS_IT_IS = nullcontext()
_ALIGNMENT = 16  # bytes that a kernel reads at once


def with_index(device: torch.device | str) -> torch.device:
    """The device as the tensors on it name it: ``cuda`` alone is the current GPU, ``cuda:0`` say."""
    device = torch.device(device)
    if device.type != "cuda":
        return device
    return torch.empty(0, device=device).device  # asked of torch: its type says that there is always an index


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
    )


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError unless ``tensor`` fits, naming the axis and both values."""
    if fits(tensor, shape, dtype, device):
        return
    check_shape(name, tensor, shape)
    check_dtype(name, tensor, (dtype,))
    check_device(name, tensor, device)
    check_layout(name, tensor)


def check_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless ``tensor`` has ``shape``."""
    if tensor.dim() != len(shape):
        raise ValueError(f"{name} has {tensor.dim()} axes {tuple(tensor.shape)}, expected {len(shape)}")
    for axis, (size, expected) in enumerate(zip(tensor.shape, shape, strict=True)):
        if size != expected:
            raise ValueError(f"{name} axis {axis} is {size}, expected {expected}")


def check_layout(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless ``tensor`` is contiguous and begins at a multiple of 16 bytes."""
    expected = 1
    for axis in range(tensor.dim() - 1, -1, -1):
        if tensor.stride(axis) != expected and tensor.shape[axis] > 1:
            raise ValueError(f"{name} axis {axis} has stride {tensor.stride(axis)}, expected {expected}")
        expected *= tensor.shape[axis]
    if tensor.data_ptr() % _ALIGNMENT:
        offset = tensor.data_ptr() % _ALIGNMENT
        raise ValueError(f"{name} begins {offset} bytes past a multiple of {_ALIGNMENT}, expected 0")


def check_dtype(name: str, tensor: Tensor, expected: Sequence[torch.dtype]) -> None:
    """Raise ValueError unless ``tensor`` has one of the dtypes ``expected``."""
    if tensor.dtype not in expected:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, expected))}")


def check_device(name: str, tensor: Tensor, expected: torch.device) -> None:
    """Raise ValueError unless ``tensor`` is on the device ``expected``."""
    if tensor.device != expected:
        raise ValueError(f"{name} is on {tensor.device}, expected {expected}")


def check_int32(name: str, array: npt.NDArray[np.int32], num_axes: int) -> None:
    """Raise ValueError unless ``array`` is a contiguous numpy array of int32 with ``num_axes`` axes."""
    if array.dtype != np.int32:
        raise ValueError(f"{name} is {array.dtype}, expected int32")
    if array.ndim != num_axes:
        raise ValueError(f"{name} has {array.ndim} axes {array.shape}, expected {num_axes}")
    if not array.flags.c_contiguous:
        wanted = np.empty(array.shape, np.int32).strides
        axis = next(a for a in range(num_axes) if array.strides[a] != wanted[a])
        stride, expected = array.strides[axis], wanted[axis]
        raise ValueError(f"{name} axis {axis} has a stride of {stride} bytes, expected {expected}")
