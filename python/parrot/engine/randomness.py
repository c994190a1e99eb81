"""Random numbers that depend on a seed and a position alone: no state, any order, a whole batch at once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def fresh_seed(seed: int | None) -> int:
    """A seed as an unsigned 64-bit number; a random one for None."""
    return secrets.randbits(64) if seed is None else seed % 2**64


def uniform(seeds: U64, positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """float64 [n] in [0, 1): element ``positions[i]`` of the SplitMix64 sequence that ``seeds[i]`` starts.

    The seed itself is mixed first, so that neighbouring seeds start far apart in the sequence."""
    places = np.array(positions, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds + _STEP) + (places + np.uint64(1)) * _STEP)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: U64) -> U64:
    """SplitMix64's finaliser: every bit of the input changes about half of the output's."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
