"""Products of a few rows with a weight, in Triton: what a step of a few decodes spends its time on.

Such a product reads a weight once and computes next to nothing. What follows it, and with one row the RMSNorm
before it, is done in the same launch; sums are float32. No result depends on other rows or on who ends when.
How the figures below were found: docs/engine.md.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .triton_linear_kernels import row_product, rows_product
from .triton_ops import rms_norm, starts_early

MAX_ROWS = 16  # more are cuBLAS's; tensor cores take no fewer
_TILE, _STEP = 64, 128  # of several rows: of the weight, for a program, and columns at a time
_MULTIPROCESSORS = 132  # of the GPU that this is tuned for


class FewRowProducts:
    """Products on one device, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._early = starts_early(device)
        # A cut sum has at least 32 columns for each tile: enough for any depth up to 131,072.
        self._arrivals = torch.zeros(4096, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        gated: bool = False,
        added_to: Tensor | None = None,
    ) -> Tensor:
        """``x`` [T, depth], T from 1 to ``MAX_ROWS``, times ``weight`` [size, depth] plus ``bias`` [size]: a
        new tensor [T, size], or added to ``added_to`` [T, size], which is returned.

        ``norm``: gain [depth] and epsilon of an RMSNorm of ``x`` before that. ``gated``: the weight is
        [gate; up], and the result silu(gate) * up, [T, size / 2]. All contiguous and of one dtype."""
        size = len(weight) // 2 if gated else len(weight)
        out = x.new_empty(len(x), size) if added_to is None else added_to
        options = {
            "GATED": gated,
            "HAS_BIAS": bias is not None,
            "ADDS": added_to is not None,
            "EARLY": self._early,
            "launch_pdl": self._early,
        }
        bias = x if bias is None else bias
        if len(x) == 1 and goes_by_row(x.shape[1]):
            _row(x, norm, weight, bias, out, options)
        else:
            y = x if norm is None else rms_norm(x, *norm)
            self._rows(y, weight, bias, out, options)
        return out

    def _rows(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, options: dict[str, bool]) -> None:
        (num_rows, depth), size = x.shape, out.shape[1]
        tiles = triton.cdiv(size, _TILE // 2 if options["GATED"] else _TILE)
        split, stages = rows_tiling(tiles, depth, x.element_size())
        parts = x.new_empty(tiles * split * _TILE * MAX_ROWS, dtype=torch.float32) if split > 1 else x
        rows_product[(tiles, split)](
            x,
            weight,
            bias,
            out,
            parts,
            self._arrivals,
            num_rows,
            SIZE=size,
            DEPTH=depth,
            TILE=_TILE,
            STEP=_STEP,
            ROWS=MAX_ROWS,
            SPLIT=split,
            num_warps=4,
            num_stages=stages,
            **options,
        )


def _row(
    x: Tensor,
    norm: tuple[Tensor, float] | None,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    options: dict[str, bool],
) -> None:
    gain, eps = (x, 0.0) if norm is None else norm
    size, depth = out.shape[1], x.shape[1]
    tile, step, warps = row_tiling(size, depth, has_norm=norm is not None)
    row_product[(triton.cdiv(size, tile // 2 if options["GATED"] else tile),)](
        x,
        gain,
        weight,
        bias,
        out,
        eps,
        SIZE=size,
        DEPTH=depth,
        TILE=tile,
        STEP=step,
        HAS_NORM=norm is not None,
        num_warps=warps,
        **options,
    )


def goes_by_row(depth: int) -> bool:
    """Whether a single row of this depth takes the kernel for one row. At 5120 it was slower than the other
    (llama-13b: 7.92 ms for a sequence, 7.26 for two); up to 4096 and from 11,008 on it is faster."""
    return not 4096 < depth < 8192


def row_tiling(size: int, depth: int, *, has_norm: bool) -> tuple[int, int, int]:
    """Of a product with one row: rows of the weight for a program, columns at a time, warps."""
    if has_norm:
        return (4, 512, 2) if depth <= 1024 else (2, 1024, 4)
    return 4 if size >= 4096 else 2, 2048, 8


def rows_tiling(tiles: int, depth: int, element_size: int) -> tuple[int, int]:
    """Of a product with several rows: programs that share the sum of a tile, where it is long and the tiles
    are few, and stages of the pipeline. With three stages instead of four, three programs fit a
    multiprocessor instead of two: better if all can be there at once."""
    split = 1
    while depth >= 32 * tiles * split * split:
        split *= 2
    is_third_needed = 2 * _MULTIPROCESSORS < tiles * split <= 3 * _MULTIPROCESSORS
    stages = 3 if is_third_needed else 4
    return split, max(2, stages * 2 // element_size)
