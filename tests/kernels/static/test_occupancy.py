"""The number of blocks of a multiprocessor, at each limit."""

from __future__ import annotations

import pytest

from tests.kernels.static.occupancy import blocks_per_multiprocessor


@pytest.mark.parametrize(
    ("capability", "warps", "registers", "shared", "blocks"),
    [
        (90, 8, 255, 164864, 1),  # prefill
        (90, 4, 168, 72704, 3),  # decode: shared memory and registers allow three
        (90, 4, 194, 115712, 2),  # batch-invariant decode: two fill the shared memory exactly
        (100, 4, 205, 115744, 1),
        (90, 4, 32, 0, 16),  # warps
        (90, 1, 16, 0, 32),  # blocks
        (89, 1, 16, 0, 24),
        (89, 4, 32, 0, 12),
        (89, 8, 255, 99 << 10, 1),
        (120, 8, 255, (99 << 10) + 1, 0),  # it cannot be launched
    ],
)
def test_the_least_limit_counts(capability: int, warps: int, registers: int, shared: int, blocks: int) -> None:
    assert blocks_per_multiprocessor(capability, warps, registers, shared) == blocks
