"""Drawing ids by temperature and min-p on a GPU, in Triton: two passes over the logits of a row.

``TRITON_INTERPRET=1`` runs it on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
_LOG2_E = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits,
    rows,
    likeliest,
    inverse_temperatures,
    least_weights,
    targets,
    out,
    vocab_size,
    TILE: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(rows + i)
    best = tl.load(likeliest + row)
    source = logits + row * vocab_size
    top = tl.load(source + tl.maximum(best, 0)).to(tl.float32)
    scale = tl.load(inverse_temperatures + i)
    least = tl.load(least_weights + i)
    column = tl.arange(0, TILE)
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, TILE):
        value = tl.load(source + start + column, mask=start + column < vocab_size, other=-float("inf"))
        weight = tl.exp2((value.to(tl.float32) - top) * scale)
        total += tl.sum(tl.where(weight >= least, weight, 0.0), 0).to(tl.float64)
    target = tl.load(targets + i) * total
    before = tl.zeros([], tl.float64)
    found = best  # of rounding: nothing reaches the target
    is_found = before > target
    for start in range(0, vocab_size, TILE):
        value = tl.load(source + start + column, mask=start + column < vocab_size, other=-float("inf"))
        weight = tl.exp2((value.to(tl.float32) - top) * scale)
        weight = tl.where(weight >= least, weight, 0.0)
        after = before + tl.sum(weight, 0).to(tl.float64)
        if (after > target) & (is_found == 0):
            sums = before + tl.cumsum(weight, 0).to(tl.float64)
            # The first id whose sum passes the target; of rounding, the last that has a weight at all.
            passes = tl.min(tl.where((sums > target) & (weight > 0.0), start + column, vocab_size), 0)
            last = tl.max(tl.where(weight > 0.0, start + column, -1), 0)
            found = tl.where(passes < vocab_size, passes, last).to(tl.int64)
            is_found = after > target
        before = after
    tl.store(out + i, tl.where(best < 0, best, found))


def draw(
    logits: Tensor,
    rows: Tensor,
    likeliest: Tensor,
    temperatures: Tensor,
    least_weights: Tensor,
    targets: Tensor,
) -> Tensor:
    """int64 [r]: of each of ``rows`` (int64 [r]) of ``logits`` [n, vocab] the id at which the sum of the
    weights exp((logit - largest) / temperature), those below the least weight left out, passes the target, a
    share of all; -1 where ``likeliest`` (int64 [n]) is.

    ``temperatures`` and ``targets`` float64 [r], targets in [0, 1); ``least_weights`` float64 [r] in [0, 1].
    A row's id depends on that row alone. Weights are float32, sums of tiles float64.
    """
    out = torch.empty_like(rows)
    if len(rows):
        _draw[(len(rows),)](
            logits,
            rows,
            likeliest,
            (_LOG2_E / temperatures).float(),
            least_weights.float(),
            targets,
            out,
            logits.shape[1],
            TILE=_TILE,
            num_warps=8,
        )
    return out
