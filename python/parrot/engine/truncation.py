"""Top-k and top-p: which ids of a row may be drawn.

Sorting a whole vocabulary can cost more than the rest of sampling, so the largest weights are looked at
first, and only rows that keep more of them are sorted; on a CPU numpy's vectorised sort is as fast as that.
What a row keeps does not depend on the other rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NUM_FIRST = 512


def likeliest(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """bool [n, vocab]: the ``top_k`` largest weights of each row and, of those, as few of the largest as have
    at least ``top_p`` of their sum. Of equal weights the lowest ids are kept.

    ``weights`` float64 [n, vocab], not negative, the largest positive; ``top_k`` int64 [n, 1] at least 1,
    ``top_p`` float64 [n, 1] in (0, 1].
    """
    vocab_size = weights.shape[1]
    top_k = top_k.clamp(max=vocab_size)
    if vocab_size <= NUM_FIRST or _sorts_fast(weights.device):
        return _at_least(weights, *_threshold(_descending(weights), top_k, top_p))
    first = torch.topk(weights, NUM_FIRST, dim=1).values
    bound, num_kept = _threshold(first, top_k, top_p, torch.cumsum(weights, dim=1)[:, -1:])
    # A row is settled if k ends within the first, or all of the row is the sum and p ends within the first.
    settled = (top_k <= NUM_FIRST) | ((top_k == vocab_size) & (num_kept < NUM_FIRST))
    rest = torch.nonzero(~settled[:, 0])[:, 0]
    if len(rest):
        bound[rest], num_kept[rest] = _threshold(_descending(weights[rest]), top_k[rest], top_p[rest])
    return _at_least(weights, bound, num_kept)


def _sorts_fast(device: torch.device) -> bool:
    return device.type == "cpu"


def _descending(weights: Tensor) -> Tensor:
    if weights.device.type == "cpu":
        return torch.from_numpy(-np.sort(-weights.numpy(), axis=1))
    return torch.sort(weights, dim=1, descending=True).values


def _threshold(
    ordered: Tensor, top_k: Tensor, top_p: Tensor, whole: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The smallest weight that is kept, float64 [n, 1], and how many are kept, int64 [n, 1].

    ``ordered`` float64 [n, m]: the largest weights, descending; ``whole`` [n, 1]: the sum of all of a row,
    needed for rows whose top_k is above m."""
    num_looked_at = ordered.shape[1]
    cumulative = torch.cumsum(ordered, dim=1)
    total = cumulative.gather(1, top_k.clamp(max=num_looked_at) - 1)
    if whole is not None:
        total = torch.where(top_k > num_looked_at, whole, total)
    # An id is in the nucleus if the sum before it is below the share: one more than the sums that are.
    num_kept = 1 + torch.searchsorted(cumulative, top_p * total)
    num_kept = torch.minimum(num_kept, top_k).clamp(max=num_looked_at)
    return ordered.gather(1, num_kept - 1), num_kept


def _at_least(weights: Tensor, bound: Tensor, num_kept: Tensor) -> Tensor:
    above, equal = weights > bound, weights == bound
    num_equal = num_kept - above.sum(dim=1, keepdim=True)
    if weights.device.type == "cpu" and bool((num_equal == equal.sum(dim=1, keepdim=True)).all()):
        return above | equal
    return above | (equal & (torch.cumsum(equal, dim=1) <= num_equal))
