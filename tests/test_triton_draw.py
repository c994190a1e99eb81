"""Drawing on a GPU against float64, in Triton's interpreter and, where there is one, on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from parrot.engine.sampling import likeliest_ids
from parrot.kernels.triton_draw import draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 2e-5  # of the sum of all weights: they are float32


def shares(logits, temperature, min_p):
    """Cumulative shares, float64, by the definition."""
    weights = ((logits.double() - logits.double().amax()) / temperature).exp()
    weights[weights < min_p] = 0.0
    return torch.cumsum(weights, 0) / weights.sum()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [5, 4096, 4097, 20_000])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_an_id_is_drawn_where_the_sum_passes_the_target(vocab_size, min_p):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(7, vocab_size, generator=generator) * 3
    rows = torch.tensor([6, 0, 3, 3, 5])
    targets = torch.tensor([0.0, 0.3, 0.9999999, 0.5, 1 - 2**-53], dtype=torch.float64)
    temperatures = torch.tensor([1.0, 0.6, 2.0, 1e-3, 0.8], dtype=torch.float64)
    on = [t.to(DEVICE) for t in (logits, rows, likeliest_ids(logits), temperatures)]
    ids = draw(*on, torch.full((5,), min_p, dtype=torch.float64, device=DEVICE), targets.to(DEVICE)).cpu()
    for row, target, temperature, token in zip(rows, targets, temperatures, ids.tolist(), strict=True):
        sums = shares(logits[row], temperature, min_p)
        below = 0.0 if token == 0 else sums[token - 1].item()
        assert below - TOLERANCE <= target <= sums[token].item() + TOLERANCE
        assert sums[token] > below, "an id without a weight"


@pytest.mark.gpu
def test_a_row_depends_on_itself_alone_and_one_that_is_not_finite_has_no_id():
    logits = torch.randn(4, 9000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[2, 77] = float("nan")
    one = torch.ones(4, dtype=torch.float64, device=DEVICE)
    likeliest = likeliest_ids(logits)
    together = draw(logits, torch.arange(4, device=DEVICE), likeliest, one, 0 * one, 0.7 * one)
    assert together[2] == -1
    for row in (0, 1, 3):
        alone = draw(
            logits[row : row + 1].contiguous(),
            torch.zeros(1, dtype=torch.int64, device=DEVICE),
            likeliest[row : row + 1],
            *(one[:1], 0 * one[:1], 0.7 * one[:1]),
        )
        assert alone[0] == together[row] >= 0


@pytest.mark.gpu
def test_a_likeliest_id_far_above_the_others_is_always_drawn():
    logits = torch.full((1, 5000), -50.0, device=DEVICE)
    logits[0, 4321] = 60.0
    row, one = (
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        torch.ones(1, dtype=torch.float64, device=DEVICE),
    )
    for target in (0.0, 0.5, 1 - 2**-53):
        assert draw(logits, row, likeliest_ids(logits), one, 0 * one, target * one).tolist() == [4321]
