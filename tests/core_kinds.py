"""What is wrong for each kind of argument of the native core, for :mod:`test_core_bad_input`.

A kind takes a right value and yields wrong ones, each with what the error must say of it beside the name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parrot import _core

Wrong = Iterator[tuple[Any, str]]  # a value, and what the error says of it
Kind = Callable[[Any], Wrong]
KEY = bytes(range(16))
BIG = 2**63  # one more than an int64
SIZES = {np.dtype(t) for t in (np.int32, np.int64, np.float32, np.float64, np.uint16, np.uint8)}


def whole(low: int | None = None, high: int | None = None, none: bool = False) -> Kind:
    """An integer of [low, high]; None may stand for it or not."""

    def wrong(_: Any) -> Wrong:
        others: list[Any] = ["x", 1.5, float("nan"), [1], BIG, -BIG - 1, 10**40]
        if low is not None:
            others += [low - 1, -BIG]
        if high is not None:
            others += [high + 1]
        for value in others if none else [*others, None]:
            yield value, str(value)

    return wrong


def real(low: float, high: float, *far: float) -> Kind:
    """A finite number of [low, high]; ``far`` are wrong too."""

    def wrong(_: Any) -> Wrong:
        yield from ((value, str(value)) for value in ("x", None, [1.0]))
        yield from ((value, "nan" if value != value else "") for value in (float("nan"), low - 1, *far))
        yield from ((value, "inf") for value in (float("inf"), -float("inf")))
        yield high * 2, ""

    return wrong


def flag(_: Any) -> Wrong:
    for value in ("yes", None, 1, 1.5, []):
        yield value, str(value)


def words(*wrong_ones: str) -> Kind:
    def wrong(_: Any) -> Wrong:
        for value in (1, None, *wrong_ones):
            yield value, str(value)

    return wrong


def key(_: Any) -> Wrong:
    """16 bytes, which the error does not repeat."""
    for value in (1, None, "x" * 16):
        yield value, str(value)
    for value in (b"", KEY[1:], KEY + b"x"):
        yield value, f"{len(value)} bytes"


def array(low: int | None = None, high: int | None = None, output: bool = False) -> Kind:
    """Of the dtype, axes and layout of the right one; integers of [low, high]."""

    def wrong(right: Any) -> Wrong:
        yield from ((value, type(value).__name__) for value in (right.tolist(), None, "x", right.tobytes()))
        for dtype in sorted(SIZES - {right.dtype}, key=str):
            yield right.astype(dtype), str(dtype)
        yield right.astype(right.dtype.newbyteorder()), ""
        yield right.astype(object), "object"
        yield right[np.newaxis], ""
        yield np.array(right.flat[0]), ""
        if right.shape[-1] > 1:
            yield np.repeat(right, 2, axis=-1)[..., ::2], ""
        yield unaligned(right), "not aligned"
        if output:
            yield read_only(right), "read-only"
        for bad in [] if low is None else [low - 1, np.iinfo(right.dtype).min]:
            yield with_last(right, bad), str(bad)
        for bad in [] if high is None else [high + 1, np.iinfo(right.dtype).max]:
            yield with_last(right, bad), str(bad)

    return wrong


def unaligned(right: Any) -> Any:
    shifted = np.zeros(right.nbytes + 1, np.uint8)[1:].view(right.dtype).reshape(right.shape)
    shifted[...] = right
    return shifted


def read_only(right: Any) -> Any:
    copy = right.copy()
    copy.flags.writeable = False
    return copy


def with_last(right: Any, value: int) -> Any:
    copy = right.copy()
    copy.flat[-1] = value
    return copy


def address(_: Any) -> Wrong:
    for value in ("x", None, 1.5, -1, 2**64):
        yield value, str(value)


def integers(_: Any) -> Wrong:
    """A sequence of int64."""
    for value in (1, "x", [BIG], [-BIG - 1], [1.5], ["x"], [None], None):
        yield value, str(value)


def tensor(right: Any) -> Wrong:
    """A TensorView; its shape has one axis more or less, or another length."""
    for value in (None, "x", (right.address, right.shape, right.strides)):
        yield value, ""
    shape, strides = right.shape, right.strides
    for other in (shape[1:], [1, *shape], [shape[0] + 1, *shape[1:]], [-1, *shape[1:]], [], [BIG - 1] * 3):
        yield _core.TensorView(right.address, other, strides), ""
    for other in (strides[1:], [-1] * len(strides), [0] * len(strides), [2**62, *strides[1:]]):
        yield _core.TensorView(right.address, shape, other), ""
    for address in (0, right.address + 1):
        yield _core.TensorView(address, shape, strides), str(address)


def buffer(right: Any) -> Wrong:
    """An output of any shape that is large enough."""
    for value, said in array(output=True)(right):
        if not (isinstance(value, np.ndarray) and value.dtype == right.dtype and value.flags.c_contiguous
                and value.flags.aligned and value.flags.writeable and value.size >= right.size):  # fmt: skip
            yield value, said


def plain(value: Any) -> Wrong:
    """A float32 array; uint16 of the same shape would be bf16."""
    return ((bad, said) for bad, said in array()(value) if getattr(bad, "dtype", None) != np.uint16)


def plain_output(value: Any) -> Wrong:
    return (
        (bad, said) for bad, said in array(output=True)(value) if getattr(bad, "dtype", None) != np.uint16
    )


def optional(values: Wrong) -> Wrong:
    return ((value, said) for value, said in values if value is not None)


def any_shape(values: Wrong) -> Wrong:
    for value, said in values:
        if not (isinstance(value, np.ndarray) and value.dtype == np.int64 and value.flags.carray):
            yield value, said
