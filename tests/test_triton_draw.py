"""Drawing on a GPU against float64, in Triton's interpreter and, where there is one, on a GPU."""

from __future__ import annotations

from math import e, log2

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from parrot.engine.truncation import likeliest as kept_ids
from parrot.kernels.draws import DRAW
from parrot.kernels.triton_draw import draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 2e-5  # of the sum of all weights: they are float32
pytestmark = pytest.mark.gpu


def drawn(logits, targets, temperature, min_p=None, top_k=None, top_p=None, rows=None):
    """Ids of :func:`draw`, from parameters as lists; a temperature of 0 takes the likeliest."""
    size = len(targets)
    draws = np.zeros(size, dtype=DRAW)
    draws["target"] = targets
    draws["scale"] = [log2(e) / each if each else 0.0 for each in temperature]
    draws["least"] = min_p or [0.0] * size
    draws["top_k"] = top_k or [2**31] * size
    draws["top_p"] = top_p or [1.0] * size
    packed = torch.from_numpy(draws.view(np.int32)).to(DEVICE)
    ids, likeliest = draw(logits[list(range(size)) if rows is None else rows].to(DEVICE), packed)
    assert [row for row, token in enumerate(ids.tolist()) if token == -1] == [
        row for row, token in enumerate(likeliest.tolist()) if token == -1
    ]
    return ids.tolist()


def shares(logits, temperature, min_p=0.0, top_k=2**31, top_p=1.0):
    """Cumulative shares, float64, by the definition."""
    weights = ((logits.double() - logits.double().amax()) / temperature).exp()
    weights[weights < min_p] = 0.0
    limits = torch.tensor([[top_k]]), torch.tensor([[top_p]], dtype=torch.float64)
    weights[~kept_ids(weights[None], *limits)[0]] = 0.0
    return torch.cumsum(weights, 0) / weights.sum()


def check(token, target, sums):
    below = 0.0 if token == 0 else sums[token - 1].item()
    assert below - TOLERANCE <= target <= sums[token].item() + TOLERANCE
    assert sums[token] > below, "an id without a weight"


@pytest.mark.parametrize("vocab_size", [5, 8192, 8193, 20_000])
@pytest.mark.parametrize("min_p", [None, 0.05])
def test_an_id_is_drawn_where_the_sum_passes_the_target(vocab_size, min_p):
    logits = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    rows, targets = [6, 0, 3, 3, 5], [0.0, 0.3, 0.9999999, 0.5, 1 - 2**-53]
    temperatures = [1.0, 0.6, 2.0, 1e-3, 0.8]
    ids = drawn(logits, targets, temperatures, None if min_p is None else [min_p] * 5, rows=rows)
    for row, target, temperature, token in zip(rows, targets, temperatures, ids, strict=True):
        check(token, target, shares(logits[row], temperature, min_p or 0.0))


@pytest.mark.parametrize("vocab_size", [50, 9000])
@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (20, 1.0), (2**31, 0.9), (30, 0.5), (2**31, 1e-9)])
def test_top_k_and_top_p_leave_out_what_they_leave_out_in_float64(vocab_size, top_k, top_p):
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(7)) * 2
    targets = [0.0, 0.4, 0.8, 1 - 2**-53]
    ids = drawn(logits, targets, [0.9] * 4, None, [top_k] * 4, [top_p] * 4)
    for row, target, token in zip(logits, targets, ids, strict=True):
        check(token, target, shares(row, 0.9, 0.0, top_k, top_p))


@pytest.mark.parametrize("top_p", [1.0, 0.3])
def test_of_equal_weights_the_lowest_ids_are_kept(top_p):
    logits = torch.zeros(1, 9000)
    logits[0, 8190:8194] = 1.0
    logits[0, 17] = -1.0
    for top_k in (3, 10, 8900):
        sums = shares(logits[0], 1.0, 0.0, top_k, top_p)
        kept = torch.nonzero(torch.diff(sums, prepend=torch.zeros(1)))[:, 0].tolist()
        for target in (0.0, 1 - 2**-53):
            (token,) = drawn(logits, [target], [1.0], None, [top_k], [top_p])
            assert token == kept[0 if target == 0.0 else -1]


def test_a_row_depends_on_itself_alone_and_one_that_is_not_finite_has_no_id():
    logits = torch.randn(4, 17_000, generator=torch.Generator().manual_seed(1))
    logits[2, 77] = float("nan")
    for limits in ({}, {"top_k": [40] * 4, "top_p": [0.8] * 4}):
        together = drawn(logits, [0.7] * 4, [1.0] * 4, **limits)
        assert together[2] == -1
        for row in (0, 1, 3):
            alone = drawn(logits[row : row + 1], [0.7], [1.0], **{k: v[:1] for k, v in limits.items()})
            assert alone == [together[row]]
            assert alone[0] >= 0


def test_a_likeliest_id_far_above_the_others_is_always_drawn():
    logits = torch.full((1, 9000), -50.0)
    logits[0, 8321] = 60.0
    for target in (0.0, 0.5, 1 - 2**-53):
        assert drawn(logits, [target], [1.0]) == [8321]
        assert drawn(logits, [target], [1.0], None, [5], [0.9]) == [8321]


def test_rows_that_are_not_drawn_have_their_likeliest_id_beside_others_that_are():
    logits = torch.randn(3, 9000, generator=torch.Generator().manual_seed(5))
    best = logits.argmax(dim=1).tolist()
    ids = drawn(logits, [0.9] * 3, [0.0, 1.0, 0.0], None, [7, 7, 7], [0.9] * 3)
    assert [ids[0], ids[2]] == [best[0], best[2]]
    check(ids[1], 0.9, shares(logits[1], 1.0, 0.0, 7, 0.9))
    assert ids[1] != best[1]


@pytest.mark.parametrize("vocab_size", [1, 64, 65, 2048, 2049, 65_537])
def test_every_id_can_be_drawn_wherever_parts_and_tiles_of_a_row_end(vocab_size):
    edges = sorted({at for at in (0, 63, 64, 65, 2047, 2048, 65_535, 65_536) if at < vocab_size})
    shares_of = torch.full((1, vocab_size), -float(2**10))
    shares_of[0, edges] = 0.0
    targets = [(i + 0.5) / len(edges) for i in range(len(edges))]
    rows = [0] * len(edges)
    assert drawn(shares_of, targets, [1.0] * len(edges), rows=rows) == edges
    limits = [None, [len(edges)] * len(edges), [1.0] * len(edges)]
    assert drawn(shares_of, targets, [1.0] * len(edges), *limits, rows=rows) == edges


def test_equal_weights_are_counted_from_tile_to_tile_of_a_part():
    logits = torch.zeros(1, 70_000)  # parts of 2240 ids, tiles of 2048
    logits[0, 2239] = 1.0
    limits = [None, [2050], [1.0]]  # that one, and the first 2049 of the others
    assert drawn(logits, [1 - 2**-53], [1.0], *limits) == [2239]
    assert drawn(logits, [2048.5 / (2049 + e)], [1.0], *limits) == [2048]
