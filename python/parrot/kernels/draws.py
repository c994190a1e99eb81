"""How the next id of a row of logits is to be chosen, as the kernels that do it read it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DRAW = np.dtype(
    [
        ("target", "<f8"),  # in [0, 1): at which share of the sum of all weights the id lies
        ("top_p", "<f8"),  # in (0, 1]; 1: off
        ("top_k", "<i8"),  # at least 1; the vocabulary's size or more: off
        ("scale", "<f4"),  # log2(e) / temperature; 0: the likeliest id
        ("least", "<f4"),  # min-p, in [0, 1]; 0: off
    ]
)
DRAW_SIZE = DRAW.itemsize // 4  # int32 elements
Draws = npt.NDArray[np.void]  # [n] of DRAW
