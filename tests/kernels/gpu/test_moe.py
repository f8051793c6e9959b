"""Mixtures of experts in Triton, in shapes for the interpreter."""

import pytest
import torch

from quire import kernels
from quire.kernels.gpu import moe, tile_sizes
from quire.kernels.moe import CLAMPED, Routing, route
from tests.kernels.test_moe import HIDDEN, make_moe
from tests.support.kernels.implementations import ON_CUDA, TRITON_DTYPES, make_triton_ops
from tests.support.kernels.interpreter import make_dot_row_invariant
from tests.support.kernels.oracle import assert_close

ROUTINGS = [
    Routing(3, 2, normalised=True),
    Routing(4, 1, normalised=False),
    Routing(5, 3, normalised=True, activation=CLAMPED),
]


@pytest.mark.slow
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_experts_give_the_sum_of_the_reference(ops, routing):
    reference = kernels.ReferenceOps(ops.device)
    results = []
    x = torch.randn(19, HIDDEN)
    for one in (ops, reference):
        torch.manual_seed(1)
        results.append(one.moe(x, make_moe(one, routing)))
    assert_close(results[0], results[1].double(), 1 + results[1].double().abs(), rounds=4)


@pytest.mark.slow
def test_experts_without_rows_and_of_many_tiles(ops):
    """All rows go to one of the experts, and then each row to another one."""
    routing, reference = Routing(4, 1, True), kernels.ReferenceOps(ops.device)
    for biased in (3, 0):
        x, results = torch.randn(37, HIDDEN), []
        for one in (ops, reference):
            torch.manual_seed(2)
            packed = make_moe(one, routing)
            router = one.pack_linear(packed.router.weight, torch.eye(4)[biased] * 1000)
            results.append(one.moe(x, type(packed)(**{**vars(packed), "router": router})))
        assert_close(results[0], results[1].double(), 1 + results[1].double().abs(), rounds=4)


@pytest.mark.parametrize("routing", [Routing(5, 3, True), Routing(5, 5, False), Routing(1, 1, False)], ids=str)
def test_experts_are_chosen_as_the_definition_says(ops, routing):
    logits = torch.randn(6, routing.num_experts)
    logits[0] = 2.0
    logits[1, :] = float("-inf")
    logits[1, -1] = 1.0
    logits[2, 1:] = float("nan")
    ids, weights = moe.route(logits, routing)
    expected, expected_weights = route(logits, routing)
    assert torch.equal(ids.long(), expected)
    torch.testing.assert_close(weights, expected_weights)


def test_rows_of_nan_choose_experts_that_exist(ops):
    ids, _ = moe.route(torch.full((2, 5), float("nan")), Routing(5, 2, True))
    assert ids.tolist() == [[0, 1], [0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_bits_of_a_row_do_not_depend_on_the_batch(monkeypatch, dtype):
    if not ON_CUDA:
        make_dot_row_invariant(monkeypatch)
    ops = make_triton_ops(dtype, monkeypatch, batch_invariant=True)
    packed = make_moe(ops, ROUTINGS[0])
    x = torch.randn(40, HIDDEN).to(dtype)
    together = ops.moe(x, packed)
    for first, end in ((0, 1), (5, 17)):
        assert torch.equal(ops.moe(x[first:end].contiguous(), packed), together[first:end])


def test_tiles_follow_the_number_of_rows_of_an_expert():
    found = [tile_sizes.grouped_tiles(rows, 8, torch.bfloat16).rows for rows in (8, 512, 4096)]
    assert found == [16, 64, 128]
    assert tile_sizes.grouped_tiles(8, 8, torch.bfloat16, invariant=True).rows == 64


def test_biases_of_some_experts_only_are_refused(ops):
    from quire.kernels.moe import ExpertWeights

    router = ops.pack_linear(torch.randn(2, HIDDEN))
    weights = torch.randn(16, HIDDEN), torch.randn(HIDDEN, 8)
    experts = [ExpertWeights(*weights), ExpertWeights(*weights, torch.zeros(16), torch.zeros(HIDDEN))]
    with pytest.raises(ValueError, match="expert 1 has other biases"):
        ops.pack_moe(Routing(2, 1, True), router, experts)
