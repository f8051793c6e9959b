"""Mixtures of experts in Triton, in shapes for the interpreter."""

from dataclasses import replace

import pytest
import torch

from quire import kernels
from quire.kernels.gpu import moe
from quire.kernels.gpu.grouped_matmul import KINDS
from quire.kernels.grouped_weight import FP8, MAX_ZEROS, UINT4, GroupedWeight
from quire.kernels.moe import CLAMPED, ExpertWeights, PackedMoE, Routing, route
from tests.kernels.test_grouped_weight import random_weight
from tests.kernels.test_moe import HIDDEN, INNER, make_moe, random
from tests.support.kernels.implementations import LONG_WITHOUT_GPU, ON_CUDA, TRITON_DTYPES, make_triton_ops
from tests.support.kernels.interpreter import make_dot_row_invariant
from tests.support.kernels.oracle import assert_close


def coded_weight(kind: str, n: int, k: int, has_order: bool = False) -> GroupedWeight:
    """Return codes whose products with normal rows are near 1."""
    weight = random_weight(kind, n, k)
    scales = weight.scales / float(weight.dequantized().std() * k**0.5)
    if kind in MAX_ZEROS:
        scales = scales.half().float()
    return replace(weight, scales=scales, order=torch.randperm(k).int() if has_order else None)


def make_moe_of_codes(ops: kernels.Ops, kind: str, routing: Routing, has_order: bool = False) -> PackedMoE:
    """Make a layer of experts with random codes; those of gpt-oss have biases."""

    def bias(size: int) -> torch.Tensor | None:
        return torch.randn(size).to(ops.dtype) if routing.activation == CLAMPED else None

    router = ops.pack_linear((4 * random(routing.num_experts, HIDDEN)).to(ops.dtype), bias(routing.num_experts))
    experts = [
        ExpertWeights(
            coded_weight(kind, 2 * INNER, HIDDEN, has_order),
            coded_weight(kind, HIDDEN, INNER, has_order),
            bias(2 * INNER),
            bias(HIDDEN),
        )
        for _ in range(routing.num_experts)
    ]
    return ops.pack_moe(routing, router, experts)


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


@pytest.mark.slow
@pytest.mark.parametrize("routing", [ROUTINGS[0], ROUTINGS[2]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_codes_give_the_sum_of_the_reference(ops, kind, routing):
    reference = kernels.ReferenceOps(ops.device, ops.dtype)
    results = []
    x = torch.randn(19, HIDDEN).to(ops.dtype)
    for one in (ops, reference):
        torch.manual_seed(1)
        packed = make_moe_of_codes(one, kind, routing)
        results.append(one.moe(x, packed))
        if one is ops:
            assert packed.kind == kind
            floats = 3 * HIDDEN * INNER * routing.num_experts * ops.dtype.itemsize
            assert packed.nbytes < 0.5 * floats * (1 if ops.dtype.itemsize == 4 else 2)
    found, expected = results
    assert_close(found, expected.double(), 1 + expected.double().abs(), rounds=4)


@pytest.mark.slow
def test_codes_in_an_order_of_their_own_are_expanded(ops):
    routing, reference = ROUTINGS[0], kernels.ReferenceOps(ops.device, ops.dtype)
    results = []
    x = torch.randn(5, HIDDEN).to(ops.dtype)
    for one in (ops, reference):
        torch.manual_seed(1)
        packed = make_moe_of_codes(one, UINT4, routing, has_order=True)
        results.append(one.moe(x, packed))
        assert one is reference or packed.kind == ""
    found, expected = results
    assert_close(found, expected.double(), 1 + expected.double().abs(), rounds=4)


@LONG_WITHOUT_GPU
@pytest.mark.parametrize("kind", [FP8, UINT4])
def test_bits_of_a_row_of_codes_do_not_depend_on_the_batch(monkeypatch, kind):
    if not ON_CUDA:
        make_dot_row_invariant(monkeypatch)
    ops = make_triton_ops(torch.float32, monkeypatch, batch_invariant=True)
    packed = make_moe_of_codes(ops, kind, ROUTINGS[0])
    x = torch.randn(40, HIDDEN)
    together = ops.moe(x, packed)
    for first, end in ((0, 1), (5, 17)):
        assert torch.equal(ops.moe(x[first:end].contiguous(), packed), together[first:end])


def test_experts_of_several_kinds_of_codes_are_refused(ops):
    router = ops.pack_linear(torch.randn(2, HIDDEN).to(ops.dtype))
    experts = [ExpertWeights(coded_weight(kind, 16, HIDDEN), coded_weight(kind, HIDDEN, 8)) for kind in (FP8, UINT4)]
    with pytest.raises(ValueError, match="expert 1 has weights of the kind 'uint4', and expert 0 of 'fp8'"):
        ops.pack_moe(Routing(2, 1, True), router, experts)


def test_biases_of_some_experts_only_are_refused(ops):
    router = ops.pack_linear(torch.randn(2, HIDDEN))
    weights = torch.randn(16, HIDDEN), torch.randn(HIDDEN, 8)
    experts = [ExpertWeights(*weights), ExpertWeights(*weights, torch.zeros(16), torch.zeros(HIDDEN))]
    with pytest.raises(ValueError, match="expert 1 has other biases"):
        ops.pack_moe(Routing(2, 1, True), router, experts)
