"""Uniform numbers by seed and position."""

from __future__ import annotations

import numpy as np

from parrot.engine.randomness import fresh_seed, uniform


def numbers(seeds: list[int], positions: list[int]) -> np.ndarray:
    return uniform(np.array(seeds, dtype=np.uint64), positions)


def test_a_number_depends_on_its_own_seed_and_position_alone() -> None:
    seeds, positions = [3, 2**64 - 1, 3, 0], [0, 7, 8, 2**31]
    alone = [numbers([seed], [position])[0] for seed, position in zip(seeds, positions, strict=True)]
    assert numbers(seeds, positions).tolist() == alone
    assert len(set(alone)) == 4


def test_the_sequence_is_that_of_splitmix64() -> None:
    """Computed with Python's integers from the published recurrence, seeded with the mixed seed."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    state = mix((42 + 0x9E3779B97F4A7C15) % 2**64)
    for position in range(5):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        assert numbers([42], [position])[0] == (mix(state) >> 11) * 2.0**-53


def test_numbers_are_uniform_along_positions_along_seeds_and_along_both() -> None:
    count = 100_000
    walks = [
        ([9] * count, list(range(count))),
        (list(range(count)), [9] * count),
        (list(range(count)), list(range(count, 0, -1))),  # their sum is constant
    ]
    for seeds, positions in walks:
        values = numbers(seeds, positions)
        assert ((values >= 0) & (values < 1)).all()
        counts = np.bincount((values * 64).astype(int), minlength=64)
        assert ((counts - count / 64) ** 2 / (count / 64)).sum() < 103  # 0.1 % of fair ones exceed it
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.011


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert fresh_seed(-1) == 2**64 - 1
    assert fresh_seed(None) != fresh_seed(None)
