"""Drawing on a GPU against float64, in Triton's interpreter and, where there is one, on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from parrot.engine.sampling import likeliest_ids
from parrot.engine.truncation import likeliest as kept_ids
from parrot.kernels.triton_draw import DrawParameters, draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 2e-5  # of the sum of all weights: they are float32
pytestmark = pytest.mark.gpu


def column(values, dtype=torch.float64):
    return None if values is None else torch.tensor(values, dtype=dtype)


def drawn(logits, targets, temperature, min_p=None, top_k=None, top_p=None, rows=None):
    """Ids of :func:`draw`, from parameters as lists."""
    size = len(targets)
    rows = list(range(size)) if rows is None else rows
    if top_p is not None and top_k is None:
        top_k = [2**31] * size
    parts = [column(rows, torch.int64), column(temperature), column(min_p), column(top_k, torch.int64)]
    parts.append(column(top_p or [1.0] * size))
    parameters = DrawParameters(*(None if part is None else part.to(DEVICE) for part in parts))
    on = logits.to(DEVICE)
    return draw(on, likeliest_ids(on), column(targets).to(DEVICE), parameters).tolist()


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
