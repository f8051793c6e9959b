"""Random numbers depend on seed, choice and position only, and are evenly distributed."""

from __future__ import annotations

import numpy as np
from scipy import stats

from quire.worker.engine.randomness import uniform

# A stream that moves to a worker of another version must draw on in the same way.
FROZEN = (0.13870941014555427, 0.9880658192551784)


def test_random_numbers_depend_on_seed_choice_and_position_and_on_nothing_else() -> None:
    keys = [(s, c, p) for s in range(20) for c in range(10) for p in range(20)]
    numbers = uniform(*np.array(keys, dtype=np.uint64).T)
    assert len(set(numbers.tolist())) == len(numbers)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 1e-4
    shuffled = np.random.default_rng(0).permutation(len(keys))
    assert (uniform(*np.array(keys, dtype=np.uint64)[shuffled].T) == numbers[shuffled]).all()
    ends = np.array([(0, 0, 0), (2**64 - 1, 3, 1000)], dtype=np.uint64)
    assert tuple(uniform(*ends.T).tolist()) == FROZEN
