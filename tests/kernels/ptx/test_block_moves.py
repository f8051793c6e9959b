"""Moves of blocks, compiled for Hopper."""

import pytest

from quire import kernels
from tests.kernels.gpu import test_block_moves
from tests.kernels.ptx.emulator import Emulator


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_blocks_move_within_the_caches_and_to_the_host_and_back(
    emulator: Emulator, emulated_ops: kernels.Ops, monkeypatch: pytest.MonkeyPatch, fp8: bool
) -> None:
    test_block_moves.test_blocks_move_within_the_caches_and_to_the_host_and_back(emulated_ops, monkeypatch, fp8)
    assert emulator.sources.keys() == {"move_kernel"}
