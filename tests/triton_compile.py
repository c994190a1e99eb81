"""Compiles the Triton kernels for a GPU that need not be here: ``python tests/triton_compile.py``.

In a process of its own, because the interpreter, which the tests use, takes the place of the compiler.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from parrot.kernels import (
    paged_prefill,
    shared_prefix_triton,
    triton_draw,
    triton_ids,
    triton_linear_kernels,
    triton_ops,
)

HOPPER = GPUTarget("cuda", 90, 32)
MODEL = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128}
UP = {"SIZE": 11008, "DEPTH": 4096, "GATED": True, "HAS_BIAS": True, "ADDS": False, "EARLY": True}
DOWN = {"SIZE": 4096, "DEPTH": 11008, "GATED": False, "HAS_BIAS": False, "ADDS": True, "EARLY": True}
SEVERAL = {"TILE": 64, "STEP": 128, "ROWS": 16}
POINTERS = {
    "positions": "*i32",
    "slots": "*i32",
    "cosines": "*fp32",
    "sines": "*fp32",
    "part_output": "*fp32",
    "part_max_sum": "*fp32",
    "num_entries": "*i32",
    "entries": "*i32",
    "members": "*i32",
    "part_begin": "*i32",
    "tiles": "*i32",
    "values": "*fp32",
    "ids": "*i32",
    "token_ids": "*i32",
    "previous_ids": "*i64",
    "likeliest": "*i64",
    "draw_doubles": "*fp64",
    "draw_longs": "*i64",
    "draw_floats": "*fp32",
    "sums": "*fp64",
    "equals": "*i32",
    "bounds": "*fp32",
    "num_equals": "*i32",
    "parts": "*fp32",
    "arrivals": "*i32",
}
SCALARS = {
    "eps": "fp32",
    "scale_log2": "fp32",
    "max_blocks": "i32",
    "size": "i32",
    "part_size": "i32",
    "num_rows": "i32",
    "vocab_size": "i32",
}
KERNELS: list[tuple[Any, dict[str, object], dict[str, str]]] = [
    (triton_ops._rms_norm, {"SIZE": 4096, "PADDED": 4096, "EARLY": True}, {}),
    (triton_ops._silu_mul, {"SIZE": 11008, "TILE": 1024}, {}),
    (triton_ops._rope_append, {**MODEL, "PADDED": 64, "TILE": 16, "HAS_NORMS": True, "EARLY": True}, {}),
    (triton_linear_kernels.row_product, {**UP, "TILE": 2, "STEP": 1024, "HAS_NORM": True}, {}),
    (triton_linear_kernels.row_product, {**DOWN, "TILE": 4, "STEP": 2048, "HAS_NORM": False}, {}),
    (triton_linear_kernels.rows_product, {**UP, **SEVERAL, "SPLIT": 1}, {}),
    (triton_linear_kernels.rows_product, {**DOWN, **SEVERAL, "SPLIT": 4}, {}),
    *(
        (
            paged_prefill._prefill,
            {**MODEL, "PADDED": 128, "ROWS": rows, "TILE": 64, "BLOCK": 16, "WIDE": wide},
            {"block_tables": "*i32"},
        )
        for rows, wide in (
            (paged_prefill.LOW, False),
            (paged_prefill.TALL, False),
            (paged_prefill.TALL, True),
        )
    ),
    (shared_prefix_triton._attend, {**MODEL, "ROWS": 64, "TILE": 64, "BLOCK": 16}, {"block_tables": "*i32"}),
    (shared_prefix_triton._merge, {"HEADS": 32, "HEAD_DIM": 128}, {}),
    (triton_ids._best_of_parts, {"PARTS": 32, "TILE": 2048}, {}),
    (triton_ids._best_of_row, {"PARTS": 32}, {"out": "*i64"}),
    (triton_ids._put_known_ids, {"ROWS": 1024}, {}),
    (triton_draw._bounds, {"PARTS": 32, "TILE": triton_draw._TILE}, {}),
    (triton_draw._sum_parts, {"PARTS": 32, "TILE": triton_draw._PART_TILE}, {}),
    (triton_draw._find, {"PARTS": 32, "TILE": triton_draw._PART_TILE}, {"out": "*i64"}),
]


def main() -> None:
    """Compile each kernel in float16 and bfloat16; print its name and the shared memory it takes."""
    for kernel, constants, pointers in KERNELS:
        for dtype in ("fp16", "bf16"):
            types = {**SCALARS, **POINTERS, **pointers}
            signature = {
                name: "constexpr" if name in constants else types.get(name, f"*{dtype}")
                for name in kernel.arg_names
            }
            rows = int(str(constants.get("ROWS", 64)))
            source = ASTSource(kernel, signature, constexprs=constants)
            compiled = triton.compile(source, target=HOPPER, options={"num_warps": max(4, rows // 16)})
            print(kernel.__name__, dtype, compiled.metadata.shared, len(compiled.asm["cubin"]))


if __name__ == "__main__":
    main()
