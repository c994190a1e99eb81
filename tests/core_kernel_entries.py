"""How the plans and kernels of the native core are called, and the kinds of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from core_entries import Entry, i32, i64
from core_kinds import (
    address,
    any_shape,
    array,
    buffer,
    flag,
    integers,
    optional,
    plain,
    plain_output,
    real,
    tensor,
    whole,
    words,
)
from parrot import _core

PLAN = {
    "block_tables": np.array([[0, 1], [0, 2]], np.int32), "seq_lens": i32(20, 20),
    "entries": np.zeros((8, 8), np.int32), "members": np.zeros((8, 2), np.int32), "part_begin": i32(0, 0, 0),
    "group_size": 1, "num_kv_heads": 1, "num_workers": 2, "block_size": 16, "max_rows": 64,
    "min_shared_tokens": 64, "min_chunk_tokens": 128, "share": True,
    "entry_tokens": 110, "own_entry_tokens": 5, "row_tokens": 5,
}  # fmt: skip
COUNT = whole(1, 2**31 - 1)


def attention(planned: bool) -> tuple[_core.CpuAttention, dict[str, Any]]:
    made = _core.CpuAttention(4, 2, 16, "float32")
    step = {
        "query_start": i32(0, 1, 2), "seq_lens": i32(20, 3),
        "block_tables": np.array([[0, 1], [2, -1]], np.int32),
        "num_blocks": 3, "num_threads": 1, "share": True, "min_shared_tokens": 64,
    }  # fmt: skip
    if planned:
        made.plan(**step)
    return made, step


def view(values: Any) -> _core.TensorView:
    strides = [stride // values.itemsize for stride in values.strides]
    return _core.TensorView(values.ctypes.data, values.shape, strides)


KEPT = {
    "query": np.zeros((2, 4, 16), np.float32), "k_cache": np.zeros((3, 16, 2, 16), np.float32),
    "v_cache": np.zeros((3, 16, 2, 16), np.float32), "out": np.zeros((2, 4, 16), np.float32),
}  # fmt: skip


def run_entry() -> tuple[Callable[..., Any], dict[str, Any]]:
    return attention(True)[0].run, {**{name: view(kept) for name, kept in KEPT.items()}, "scale": 0.25}


def rope() -> dict[str, Any]:
    rows, caches = np.zeros((2, 3, 4), np.float32), np.zeros((2, 16, 1, 4), np.float32)
    return {
        "qkv": np.zeros((2, 20), np.float32), "cos": np.zeros((2, 2), np.float32),
        "sin": np.zeros((2, 2), np.float32), "slots": i64(0, 31), "query": rows, "key_cache": caches,
        "value_cache": caches.copy(),
    }  # fmt: skip


def linear() -> _core.PackedLinear:
    return _core.PackedLinear(np.ones((6, 4), np.float32))


KERNELS = {
    "AttentionPlanner.plan": Entry(
        lambda: (_core.AttentionPlanner().plan, dict(PLAN)),
        {"block_tables": array(low=0), "seq_lens": array(low=1, high=32), "entries": buffer,
         "members": buffer,
         "part_begin": buffer, "group_size": whole(1, 64), "num_kv_heads": COUNT, "num_workers": COUNT,
         "block_size": COUNT, "max_rows": COUNT, "min_shared_tokens": COUNT, "min_chunk_tokens": COUNT,
         "share": flag, "entry_tokens": whole(0, 2**31 - 1), "own_entry_tokens": whole(0, 2**31 - 1),
         "row_tokens": whole(0, 2**31 - 1)},
    ),
    "TensorView.__init__": Entry(
        lambda: (_core.TensorView, {"address": 64, "shape": [1], "strides": [1]}),
        {"address": address, "shape": integers, "strides": integers},
    ),
    "CpuAttention.__init__": Entry(
        lambda: (_core.CpuAttention, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}),
        {"num_heads": whole(1, 2**16), "num_kv_heads": whole(1, 4), "head_dim": whole(16, 512),
         "dtype": words("float16", "")},
    ),
    "CpuAttention.plan": Entry(
        lambda: (attention(False)[0].plan, attention(False)[1]),
        {"query_start": array(low=2), "seq_lens": array(low=1, high=32), "block_tables": array(),
         "num_blocks": COUNT, "num_threads": whole(0, 1024), "share": flag,
         "min_shared_tokens": whole(-(2**31), 2**31 - 1)},
    ),
    "CpuAttention.run": Entry(run_entry, {**dict.fromkeys(KEPT, tensor), "scale": real(0, 2e38, 0.0)}),
    "PackedLinear.__init__": Entry(
        lambda: (_core.PackedLinear, {"weight": np.ones((6, 4), np.float32), "gated": True}),
        {"weight": plain, "gated": flag},
    ),
    "PackedLinear.forward": Entry(
        lambda: (
            linear().forward,
            {"x": np.ones((2, 4), np.float32), "out": np.zeros((2, 6), np.float32),
             "norm": np.ones(4, np.float32), "eps": 1e-5, "add": False},
        ),
        {"x": plain, "out": array(output=True), "norm": lambda right: optional(array()(right)),
         "eps": real(0, 3e38), "add": flag},
    ),
    "PackedLinear.gather": Entry(
        lambda: (linear().gather, {"rows": i64(0, 5), "out": np.zeros((2, 4), np.float32)}),
        {"rows": array(low=0, high=5), "out": array(output=True)},
    ),
    "argmax_rows": Entry(
        lambda: (_core.argmax_rows, {"logits": np.ones((2, 3), np.float32), "ids": i64(0, 0)}),
        {"logits": array(), "ids": array(output=True)},
    ),
    "rope_append": Entry(
        lambda: (_core.rope_append, rope()),
        {"qkv": array(), "cos": array(), "sin": array(), "slots": array(low=0, high=31),
         "query": plain_output, "key_cache": plain_output, "value_cache": plain_output},
    ),
    "set_cpu_isa": Entry(lambda: (_core.set_cpu_isa, {"isa": ""}), {"isa": words("sse9")}),
    "set_cpu_threads": Entry(
        lambda: (_core.set_cpu_threads, {"num_threads": _core.cpu_threads()}), {"num_threads": whole(1, 1024)}
    ),
    "count_cpu_parts": Entry(
        lambda: (_core.count_cpu_parts, {"num_parts": 2, "repeats": 1}),
        {"num_parts": whole(0, 2**16), "repeats": whole(0, 2**24)},
    ),
    "sum_cpu_words": Entry(
        lambda: (_core.sum_cpu_words, {"words": i64(1, 2), "num_threads": 1}),
        {"words": lambda right: any_shape(array()(right)), "num_threads": whole(1, 1024)},
    ),
}  # fmt: skip
