"""Packed linear layers and rotary embedding against float64, on every instruction set; the memory around
theirs holds NaN."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot import _core

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U16 = npt.NDArray[np.uint16]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    threads = _core.cpu_threads()
    yield
    _core.set_cpu_threads(threads)


def to_bf16(values: F32) -> U16:
    """Bits, rounded to nearest even."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: U16) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rows_of(rng: np.random.Generator, rows: int, columns: int) -> F32:
    """Random rows in the middle of an array of NaN."""
    array = np.full((rows + 2, columns), nan, np.float32)
    array[1:-1] = rng.normal(size=(rows, columns))
    return array[1:-1]


def reference(x: F32, weight: F32, norm: F32 | None, gated: bool) -> tuple[F64, F64]:
    """The outputs, and beside each the sum of its terms' magnitudes: what rounding is relative to, however
    much of them cancels."""
    y, w = x.astype(np.float64), weight.astype(np.float64)
    if norm is not None:
        y = y / np.sqrt((y * y).mean(1, keepdims=True) + EPS) * norm
    outputs, magnitudes = y @ w.T, abs(y) @ abs(w).T
    if not gated:
        return outputs, magnitudes
    gate, up = np.split(outputs, 2, axis=1)
    gate_magnitude, up_magnitude = np.split(magnitudes, 2, axis=1)
    activated = gate / (1 + np.exp(-gate))
    return activated * up, 1.1 * gate_magnitude * abs(up) + abs(activated) * up_magnitude


def check(
    rng: np.random.Generator,
    isa: str,
    shape: tuple[int, int, int],
    *,
    bf16: bool = False,
    bf16_input: bool = False,
    norm: bool = False,
    gated: bool = False,
    add: bool = False,
) -> None:
    rows, inputs, outputs = shape
    outputs = 2 * outputs if gated else outputs
    weight, x = rng.normal(size=(outputs, inputs)).astype(np.float32), rows_of(rng, rows, inputs)
    scale = rng.uniform(0.5, 1.5, inputs).astype(np.float32) if norm else None
    given_x: F32 | U16 = to_bf16(x) if bf16_input else x
    packed_from: F32 | U16 = to_bf16(weight) if bf16 else weight
    expected, magnitude = reference(
        from_bf16(to_bf16(x)) if bf16_input else x,
        from_bf16(to_bf16(weight)) if bf16 else weight,
        scale,
        gated,
    )
    linear = _core.PackedLinear(packed_from, gated=gated)
    around = np.full((rows + 2, expected.shape[1]), nan, np.float32)
    out = around[1:-1]
    if add:
        out[:] = rng.normal(size=out.shape)
        expected, magnitude = expected + out, magnitude + abs(out)
    linear.forward(given_x, out, scale, EPS, add=add)
    # AVX512-BF16 rounds inputs to eight bits, that is by at most 1/256 of each term.
    tolerance = 4e-3 if bf16 and isa == "avx512bf16" else 1e-6
    assert np.all(abs(out - expected) <= tolerance * magnitude)
    assert np.isnan(around[[0, -1]]).all()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("rows", range(1, 34))
def test_any_number_of_rows(cpu_isa: str, rows: int, bf16: bool) -> None:
    check(np.random.default_rng(rows), cpu_isa, (rows, 40, 70), bf16=bf16, norm=rows % 2 == 0)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("inputs", [1, 2, 15, 16, 17, 63, 257, 576])
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 96])
def test_sizes_that_are_no_multiple_of_a_vector(cpu_isa: str, inputs: int, outputs: int, bf16: bool) -> None:
    rng = np.random.default_rng(inputs * outputs)
    for gated in (False, True):
        check(rng, cpu_isa, (3, inputs, outputs), bf16=bf16, gated=gated, add=True)
        check(rng, cpu_isa, (13, inputs, outputs), bf16=bf16, gated=gated, norm=True)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_combination(data: st.DataObject) -> None:
    isa = data.draw(st.sampled_from(_core.cpu_isas()))
    bf16_input, norm = data.draw(st.sampled_from([(False, False), (False, True), (True, False)]))
    shape = (data.draw(st.integers(1, 130)), data.draw(st.integers(1, 300)), data.draw(st.integers(1, 200)))
    bf16, gated, add = data.draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    _core.set_cpu_threads(data.draw(st.integers(1, 5)))
    _core.set_cpu_isa(isa)
    try:
        rng = np.random.default_rng(0)
        check(rng, isa, shape, bf16=bf16, bf16_input=bf16_input, norm=norm, gated=gated, add=add)
    finally:
        _core.set_cpu_isa("")


def test_gates_of_any_size_are_finite(cpu_isa: str) -> None:
    gates = np.array([-1e30, -1000, -100, -88, -1, 0, 1, 88, 100, 1000, 1e30], np.float32)
    linear = _core.PackedLinear(np.array([[1, 0], [0, 1]], np.float32), gated=True)
    x = np.stack([gates, np.ones_like(gates)], axis=1)
    out = np.empty((len(gates), 1), np.float32)
    linear.forward(x, out)
    with np.errstate(over="ignore"):
        expected = gates.astype(np.float64) / (1 + np.exp(-gates.astype(np.float64)))
    np.testing.assert_allclose(out[:, 0], expected, rtol=1e-6, atol=1e-7)


def test_nan_stays_nan_in_its_own_row(cpu_isa: str) -> None:
    linear = _core.PackedLinear(np.ones((40, 24), np.float32))
    x, out = np.ones((14, 24), np.float32), np.empty((14, 40), np.float32)
    x[5, 7] = nan
    linear.forward(x, out)
    assert np.isnan(out[5]).all()
    assert np.isfinite(np.delete(out, 5, axis=0)).all()


def test_nothing_is_left_of_an_earlier_call(cpu_isa: str) -> None:
    even = _core.PackedLinear(to_bf16(np.ones((4, 26), np.float32)))
    even.forward(np.full((14, 26), nan, np.float32), np.empty((14, 4), np.float32))
    for rows in (1, 2, 7, 14):  # an odd input has a neighbour in its pair of bf16 that must be zero
        check(np.random.default_rng(rows), cpu_isa, (rows, 25, 40), bf16=True)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_number_of_threads_changes_nothing(cpu_isa: str, bf16: bool) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(200, 120)).astype(np.float32)
    linear = _core.PackedLinear(to_bf16(weight) if bf16 else weight)
    x, results = rng.normal(size=(150, 120)).astype(np.float32), []
    for threads in (1, 2, 7):
        _core.set_cpu_threads(threads)
        results.append(np.empty((150, 200), np.float32))
        linear.forward(x, results[-1])
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


@pytest.mark.parametrize("bf16", [False, True])
def test_rows_come_back_as_they_were_packed(bf16: bool) -> None:
    weight = np.random.default_rng(0).normal(size=(75, 21)).astype(np.float32)
    linear = _core.PackedLinear(to_bf16(weight) if bf16 else weight)
    out = np.empty((76, 21), np.float32)
    linear.gather(np.array([*range(75), 3], np.int64), out)
    expected = from_bf16(to_bf16(weight)) if bf16 else weight
    assert (out == expected[[*range(75), 3]]).all()
    assert (linear.out_features, linear.in_features, linear.num_outputs) == (75, 21, 75)
    assert linear.num_bytes == (96 * 22 * 2 if bf16 else 96 * 21 * 4)


def test_a_weight_outlives_the_array_it_came_from() -> None:
    weights = [np.full((33, 9), i, np.float32) for i in range(20)]
    layers = [_core.PackedLinear(weight) for weight in weights]
    for weight in weights:
        weight[:] = nan
    out = np.empty((1, 9), np.float32)
    for i in (3, 19, 0):
        layers[i].gather(np.array([32]), out)
        assert (out == i).all()
    del layers[:19]
    layers[0].gather(np.array([0]), out)
    assert (out == 19).all()


def test_bad_arguments_are_named() -> None:
    linear = _core.PackedLinear(np.zeros((6, 4), np.float32), gated=True)
    x, out = np.zeros((2, 4), np.float32), np.zeros((2, 3), np.float32)
    linear.forward(x, out)
    for arguments, message in (
        ((x[:, :3].copy(), out), r"x has the shape \[2, 3\], expected \[2, 4\]"),
        ((x, np.zeros((2, 6), np.float32)), r"out has the shape \[2, 6\], expected \[2, 3\]"),
        ((x, out, np.ones(3, np.float32)), r"norm has the shape \[3\], expected \[4\]"),
        ((x.astype(np.float64), out), "x has the dtype float64, expected float32"),
        ((np.zeros((2, 8), np.float32)[:, ::2], out), "x must be C-contiguous"),
        ((to_bf16(x), out, np.ones(4, np.float32)), "x must be float32 to be normalised"),
    ):
        with pytest.raises(ValueError, match=message):
            linear.forward(*arguments)
    with pytest.raises(ValueError, match="gated layer cannot be gathered"):
        linear.gather(np.zeros(1, np.int64), np.zeros((1, 4), np.float32))
    plain = _core.PackedLinear(np.zeros((6, 4), np.float32))
    for row in (-1, 6):
        with pytest.raises(ValueError, match=rf"rows\[1\] = {row} is outside \[0, 6\)"):
            plain.gather(np.array([0, row]), np.zeros((2, 4), np.float32))
    for shape in ((3,), (0, 4), (4, 0)):
        with pytest.raises(ValueError, match="weight has the shape"):
            _core.PackedLinear(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="even number of rows"):
        _core.PackedLinear(np.zeros((3, 4), np.float32), gated=True)
    with pytest.raises(ValueError, match="weight has the dtype int64"):
        _core.PackedLinear(np.zeros((3, 4), np.int64))


class Rope:
    """Arguments of ``rope_append`` for a few rows; caches of NaN."""

    def __init__(self, rows: int, bf16: bool, heads: int = 3, kv_heads: int = 2, head_dim: int = 6) -> None:
        rng = np.random.default_rng(rows)
        self.qkv = rows_of(rng, rows, (heads + 2 * kv_heads) * head_dim)
        angles = rng.uniform(0, 100, (rows, head_dim // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.slots = rng.permutation(64)[:rows].astype(np.int64)
        self.query: F32 | U16 = np.full((rows, heads, head_dim), nan, np.float32)
        self.k: F32 | U16 = np.full((4, 16, kv_heads, head_dim), nan, np.float32)
        self.v: F32 | U16 = self.k.copy()
        if bf16:
            self.query, self.k, self.v = to_bf16(self.query), to_bf16(self.k), to_bf16(self.v)

    def run(self) -> None:
        _core.rope_append(self.qkv, self.cos, self.sin, self.slots, self.query, self.k, self.v)

    def rotated(self, heads: F32) -> F64:
        first, second = np.split(heads.astype(np.float64), 2, axis=2)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


def by_token(cache: F32, pair: int, *, values: bool = False) -> F32:
    """[64, 2, 6]: four blocks in the order of csrc/kernels/cpu/kv_block.h, a token beside the other."""
    if values:
        words = cache.reshape(4, 2, 16 // pair, 6, pair).transpose(0, 2, 4, 1, 3)
    else:
        words = cache.reshape(4, 2, 6 // pair, 16, pair).transpose(0, 3, 1, 2, 4)
    return words.reshape(64, 2, 6)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 37])
def test_queries_are_rotated_and_keys_and_values_take_their_slots(rows: int, bf16: bool) -> None:
    rope = Rope(rows, bf16)
    rope.run()
    heads = rope.qkv.reshape(rows, 7, 6)
    query, k, v = (from_bf16(a) if bf16 else a for a in (rope.query, rope.k, rope.v))
    tolerance = 2**-8 if bf16 else 1e-6
    np.testing.assert_allclose(query, rope.rotated(heads[:, :3]), rtol=tolerance, atol=1e-5)
    flat_k, flat_v = by_token(k, 4 // rope.k.itemsize), by_token(v, 4 // rope.k.itemsize, values=True)
    np.testing.assert_allclose(flat_k[rope.slots], rope.rotated(heads[:, 3:5]), rtol=tolerance, atol=1e-5)
    np.testing.assert_allclose(flat_v[rope.slots], heads[:, 5:], rtol=tolerance)
    others = np.delete(np.arange(64), rope.slots)
    assert np.isnan(flat_k[others]).all()
    assert np.isnan(flat_v[others]).all()


def test_slots_and_shapes_of_a_rotation_are_checked() -> None:
    for slot in (-1, 64):
        rope = Rope(3, False)
        rope.slots[2] = slot
        with pytest.raises(ValueError, match=rf"slots\[2\] = {slot} is outside \[0, 64\)"):
            rope.run()
        assert np.isnan(rope.k).all()
    for name, message in (
        ("qkv", r"qkv has the shape \[2, 42\], expected \[3, 42\]"),
        ("cos", r"cos has the shape \[2, 3\], expected \[3, 3\]"),
        ("slots", r"slots has the shape \[2\], expected \[3\]"),
        ("v", r"value_cache has the shape \[2, 16, 2, 6\], expected \[4, 16, 2, 6\]"),
    ):
        rope = Rope(3, False)
        setattr(rope, name, getattr(rope, name)[:2])
        with pytest.raises(ValueError, match=message):
            rope.run()
    wide = Rope(3, False, head_dim=514)
    with pytest.raises(ValueError, match="an even head_dim of at most 512"):
        wide.run()
    small = Rope(3, False)
    small.k, small.v = small.k[:, :8].copy(), small.v[:, :8].copy()
    with pytest.raises(ValueError, match=r"key_cache has the shape \[4, 8, 2, 6\], expected \[4, 16, 2, 6\]"):
        small.run()
    rope = Rope(3, False)
    rope.v = to_bf16(rope.v)
    with pytest.raises(ValueError, match="must have one dtype"):
        rope.run()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_largest_logit_and_of_equal_ones_the_first(data: st.DataObject) -> None:
    columns = data.draw(st.sampled_from([1, 2, 7, 2047, 2048, 2049, 5000]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    scale = data.draw(st.sampled_from([0.0, 1e-40, 1.0, 1e38]))
    logits = (rng.integers(-3, 3, (5, columns)) * scale).astype(np.float32)
    logits[rng.integers(5), rng.integers(columns)] *= -1.0  # -0.0 among others
    ids = np.empty(5, np.int64)
    _core.argmax_rows(logits, ids)
    assert (ids == logits.argmax(1)).all()


@pytest.mark.parametrize("bad", [nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 2048, 4999])
def test_a_row_that_is_not_finite_has_no_largest_logit(bad: float, at: int) -> None:
    logits, ids = np.zeros((3, 5000), np.float32), np.empty(3, np.int64)
    logits[:, 17] = 5
    logits[1, at] = bad
    _core.argmax_rows(logits, ids)
    assert ids.tolist() == [17, -1, 17]
    with pytest.raises(ValueError, match=r"ids has the shape \[2\], expected \[3\]"):
        _core.argmax_rows(logits, ids[:2])
    with pytest.raises(ValueError, match=r"logits has the shape \[3, 0\]"):
        _core.argmax_rows(np.zeros((3, 0), np.float32), ids)
