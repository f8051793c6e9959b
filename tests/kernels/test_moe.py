"""Mixtures of experts: the choice of experts, their weighted outputs, formats of weights, and row invariance."""

import pytest
import torch

from quire import kernels
from quire.kernels.moe import CLAMPED, GELU, SILU, ExpertWeights, PackedMoE, Routing, activate, combine, route
from quire.kernels.quantization import quantize
from tests.support.kernels.oracle import assert_close

HIDDEN, INNER = 72, 40


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5


def make_moe(
    ops: kernels.Ops,
    routing: Routing,
    bits: int = 0,
    dtype: torch.dtype | None = None,
    scales: torch.Tensor | None = None,
) -> PackedMoE:
    """Make a layer of random experts; those of gpt-oss have biases. bits: of quantised weights. scales: of experts."""
    dtype = dtype or ops.dtype
    has_bias = routing.activation == CLAMPED

    def weight(*shape: int) -> object:
        return quantize(random(*shape), bits) if bits else random(*shape).to(dtype)

    def bias(size: int) -> torch.Tensor | None:
        return torch.randn(size).to(ops.dtype) if has_bias else None

    router = ops.pack_linear((4 * random(routing.num_experts, HIDDEN)).to(dtype), bias(routing.num_experts))
    experts = (
        ExpertWeights(weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER), bias(2 * INNER), bias(HIDDEN))
        for _ in range(routing.num_experts)
    )
    return ops.pack_moe(routing, router, experts, scales)


ROUTINGS = [
    Routing(5, 2, normalised=True),
    Routing(20, 3, normalised=False),
    Routing(4, 4, normalised=True, activation=CLAMPED),
    Routing(1, 1, normalised=False),
    Routing(6, 2, normalised=True, activation=GELU),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_experts_give_the_sum_of_the_reference(ops, routing, rows):
    torch.manual_seed(0)
    x = torch.randn(rows, HIDDEN).to(ops.dtype)
    torch.manual_seed(1)
    packed = make_moe(ops, routing)
    torch.manual_seed(1)
    reference = kernels.ReferenceOps(ops.device, ops.dtype)
    expected = reference.moe(x, make_moe(reference, routing))
    assert (packed.hidden, packed.inner, packed.routing) == (HIDDEN, INNER, routing)
    assert packed.nbytes >= 3 * HIDDEN * INNER * routing.num_experts * ops.dtype.itemsize
    found = ops.moe(x, packed)
    if ops.dtype == torch.float32:
        assert_close(found, expected.double(), 1 + expected.double().abs(), rounds=4)
    else:  # rounded logits may choose another of two experts that are nearly equal
        wrong = ((found - expected).float().abs() > 0.05 * (1 + expected.float().abs())).any(dim=1)
        assert int(wrong.sum()) <= rows // 20
    again = x.clone()
    assert ops.moe(again, packed, out=again) is again
    if ops.row_invariant:
        assert torch.equal(again, found)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_experts_are_those_of_the_reference(cpu_ops, bits):
    if bits not in cpu_ops.quantized_bits:
        pytest.skip("quantised weights are for float32")
    x, routing = torch.randn(50, HIDDEN), ROUTINGS[0]
    results = []
    for ops in (cpu_ops, kernels.ReferenceOps()):
        torch.manual_seed(1)
        results.append(ops.moe(x, make_moe(ops, routing, bits)))
    assert_close(results[0], results[1].double(), 1 + results[1].double().abs(), rounds=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_of_16_bits_are_computed_as_the_same_floats(cpu_ops, dtype):
    if dtype not in cpu_ops.weight_dtypes or dtype is cpu_ops.dtype:
        pytest.skip("other weights are for float32")
    weights = [ExpertWeights(random(2 * INNER, HIDDEN).to(dtype), random(HIDDEN, INNER).to(dtype)) for _ in range(5)]
    router, routing, x = random(5, HIDDEN), ROUTINGS[0], torch.randn(50, HIDDEN)
    wide = [ExpertWeights(one.gate_up.float(), one.down.float()) for one in weights]
    found, exact = (
        cpu_ops.moe(x, cpu_ops.pack_moe(routing, cpu_ops.pack_linear(router), iter(one))) for one in (weights, wide)
    )
    assert torch.equal(found, exact)


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("routing", ROUTINGS[:3], ids=str)
def test_bits_of_a_row_do_not_depend_on_the_batch(cpu_ops, routing, bits):
    if bits and bits not in cpu_ops.quantized_bits:
        pytest.skip("quantised weights are for float32")
    packed = make_moe(cpu_ops, routing, bits)
    x = torch.randn(1100, HIDDEN).to(cpu_ops.dtype)  # more than one pass
    together = cpu_ops.moe(x, packed)
    for first, end in ((0, 1), (5, 17), (1023, 1025), (900, 1100)):
        assert torch.equal(cpu_ops.moe(x[first:end].contiguous(), packed), together[first:end])
    order = torch.randperm(len(x))
    assert torch.equal(cpu_ops.moe(x[order].contiguous(), packed), together[order])


def test_rows_of_nan_harm_no_others(cpu_ops):
    packed = make_moe(cpu_ops, ROUTINGS[1])
    x = torch.randn(6, HIDDEN).to(cpu_ops.dtype)
    expected = cpu_ops.moe(x, packed)
    x[2] = float("nan")
    found = cpu_ops.moe(x, packed)
    assert found[2].isnan().any()
    assert torch.equal(found[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


def test_no_rows_give_no_rows(ops):
    assert ops.moe(torch.empty(0, HIDDEN).to(ops.dtype), make_moe(ops, ROUTINGS[0])).shape == (0, HIDDEN)


def test_equal_logits_choose_the_lower_experts():
    ids, weights = route(torch.tensor([[1.0, 3.0, 3.0, float("nan")], [0.0, 0.0, 0.0, 0.0]]), Routing(4, 2, True))
    assert ids.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(weights, torch.full((2, 2), 0.5))
    _, weights = route(torch.zeros(1, 4), Routing(4, 2, False))
    torch.testing.assert_close(weights, torch.full((1, 2), 0.25))


def test_the_activation_of_gpt_oss_is_clamped():
    found = activate(torch.tensor([[100.0, -100.0, 1.0, 50.0, 2.0, -50.0]]), CLAMPED)
    seven, one = 7 * torch.sigmoid(torch.tensor(7 * 1.702)), torch.sigmoid(torch.tensor(1.702))
    torch.testing.assert_close(found, torch.stack([8 * seven, torch.tensor(0.0), -6 * one])[None])
    gate, up = torch.randn(2, 3, 8)
    torch.testing.assert_close(activate(torch.cat([gate, up], 1), SILU), torch.nn.functional.silu(gate) * up)


def test_outputs_are_added_up_in_float32():
    outputs = torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16)
    assert combine(outputs, torch.ones(1, 3)).tolist() == [[258.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 6}, "top_k is 6: it must be in 1..5"),
        ({"top_k": 0}, "top_k is 0"),
        ({"activation": "relu"}, "activation is 'relu'"),
    ],
)
def test_a_routing_that_means_nothing_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Routing(**({"num_experts": 5, "top_k": 2, "normalised": True} | change))


def test_experts_that_do_not_fit_together_are_refused(ops):
    routing, router = Routing(2, 1, True), ops.pack_linear(random(2, HIDDEN).to(ops.dtype))
    fitting = ExpertWeights(random(2 * INNER, HIDDEN).to(ops.dtype), random(HIDDEN, INNER).to(ops.dtype))
    narrow = ExpertWeights(random(32, HIDDEN).to(ops.dtype), random(HIDDEN, 16).to(ops.dtype))
    with pytest.raises(ValueError, match="expert 1 has the shapes"):
        ops.pack_moe(routing, router, [fitting, narrow])
    with pytest.raises(ValueError, match="1 experts were given, not 2"):
        ops.pack_moe(routing, router, [fitting])
    with pytest.raises(ValueError, match="the router has 2 logits, not 3"):
        ops.pack_moe(Routing(3, 1, True), router, [fitting] * 3)


def test_experts_have_scales_and_the_router_an_input_of_its_own(ops):
    torch.manual_seed(0)
    x, router_input = (torch.randn(30, HIDDEN).to(ops.dtype) for _ in range(2))
    routing, scales = Routing(6, 2, normalised=True, activation=GELU), torch.rand(6) + 0.5
    found = []
    for one in (ops, kernels.ReferenceOps(ops.device, torch.float32)):
        torch.manual_seed(1)
        packed = make_moe(one, routing, dtype=ops.dtype if one is ops else None, scales=scales)
        found.append(one.moe(x.to(one.dtype), packed, None, router_input.to(one.dtype)).float())
    near = (found[0] - found[1]).abs() <= (1e-4 if ops.dtype is torch.float32 else 0.05) * (1 + found[1].abs())
    # Rounded logits may choose another of two experts that are nearly equal.
    assert int((~near).any(dim=1).sum()) <= (0 if ops.dtype is torch.float32 else 3)
    torch.manual_seed(1)
    unscaled = ops.moe(x, make_moe(ops, routing), None, router_input).float()
    assert (unscaled - found[0]).abs().max() > 0.1
    with pytest.raises(ValueError, match="scales has shape"):
        make_moe(ops, routing, scales=scales[1:])
    with pytest.raises(TypeError, match="scales is"):
        make_moe(ops, routing, scales=scales.double())
    with pytest.raises(ValueError, match="residual has shape"):
        ops.moe(x, make_moe(ops, routing), None, router_input[1:].contiguous())
