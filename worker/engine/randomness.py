"""Random numbers keyed by (seed, choice, position), and not by batch, step or process.

So a stream that moves to another worker, or that is recomputed after preemption, draws the same tokens.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHOICE = np.uint64(0xD1B54A32D192ED03)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA'14)."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    x ^= x >> np.uint64(31)
    return x


def uniform(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) with 53 random bits per row, for the token at that position.

    seeds, choices, positions: uint64 [R]. Returns float64 [R].
    """
    x = _mix(seeds + _GOLDEN)
    x = _mix(x + choices * _CHOICE + _GOLDEN)
    x = _mix(x + positions * _GOLDEN + _GOLDEN)
    return (x >> np.uint64(11)) * 2.0**-53
