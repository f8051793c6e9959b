"""Mixtures of experts, compiled for Hopper."""

import pytest
import torch

from quire import kernels
from quire.kernels.gpu import moe, tile_sizes
from quire.kernels.grouped_weight import KINDS
from quire.kernels.moe import Routing
from tests.kernels.gpu import test_moe
from tests.kernels.ptx.emulator import Emulator
from tests.kernels.test_moe import HIDDEN, make_moe
from tests.support.kernels.oracle import assert_close


@pytest.mark.parametrize("routing", test_moe.ROUTINGS, ids=str)
@pytest.mark.parametrize("size", [None, (64, 64, 64, 4, 3), (128, 64, 64, 8, 3)], ids=str)
def test_experts_give_the_sum_of_the_reference(
    emulator: Emulator,
    emulated_ops: kernels.Ops,
    monkeypatch: pytest.MonkeyPatch,
    routing: Routing,
    size: tuple[int, ...] | None,
) -> None:
    if size:
        monkeypatch.setattr(moe, "grouped_tiles", lambda *_: tile_sizes.MatmulTiles(*size))
    x = torch.randn(19, HIDDEN).to(emulated_ops.dtype)
    results = []
    for one in (emulated_ops, kernels.ReferenceOps("cpu", emulated_ops.dtype)):
        torch.manual_seed(1)
        results.append(one.moe(x, make_moe(one, routing)))
    found, expected = results
    assert_close(found, expected.double(), 200 * (1 + expected.double().abs()), rounds=4)
    assert emulator.sources.keys() == {"route_kernel", "grouped_kernel", "combine_kernel"}


@pytest.mark.parametrize("routing", [test_moe.ROUTINGS[0], test_moe.ROUTINGS[2]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [5, 19 * 8])
def test_experts_of_codes_give_the_sum_of_the_reference(
    emulator: Emulator, emulated_ops: kernels.Ops, kind: str, routing: Routing, rows: int
) -> None:
    """rows: few for tiles of 16, and many for tiles of 64."""
    x = torch.randn(rows, HIDDEN).to(emulated_ops.dtype)
    results = []
    for one in (emulated_ops, kernels.ReferenceOps("cpu", emulated_ops.dtype)):
        torch.manual_seed(1)
        results.append(one.moe(x, test_moe.make_moe_of_codes(one, kind, routing)))
    found, expected = results
    assert_close(found, expected.double(), 200 * (1 + expected.double().abs()), rounds=4)
    assert emulator.sources.keys() == {"route_kernel", "grouped_kernel", "combine_kernel"}


@pytest.mark.parametrize("routing", [Routing(5, 3, True), Routing(5, 5, False), Routing(1, 1, False)], ids=str)
def test_experts_are_chosen_as_the_definition_says(emulator: Emulator, wide_ops: kernels.Ops, routing: Routing) -> None:
    test_moe.test_experts_are_chosen_as_the_definition_says(wide_ops, routing)
    assert emulator.sources.keys() == {"route_kernel"}


def test_rows_of_nan_choose_experts_that_exist(wide_ops: kernels.Ops) -> None:
    test_moe.test_rows_of_nan_choose_experts_that_exist(wide_ops)
