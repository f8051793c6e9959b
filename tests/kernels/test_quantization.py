"""Quantised weights: rounding, and products that have the bits of the definition on every instruction-set level."""

import pytest
import torch
import torch.nn.functional as F

from quire import kernels
from quire.kernels.cpu.levels import LEVELS
from quire.kernels.quantization import (
    INT4_GROUP,
    MAX_MULTIPLIER,
    MAX_MULTIPLIER_SUM,
    QuantizedWeight,
    group_multipliers,
    quantize,
    quantize_rows,
    quantized_linear,
)
from tests.support.kernels.implementations import make_ops

LEVEL_NAMES = [level.name for level in LEVELS[torch.float32]]
SHAPES = [
    (1, 1, 1),
    (1, 64, 32),
    (2, 77, 33),
    (5, 576, 48),
    (13, 200, 65),
    (29, 130, 257),
    (70, 96, 40),
    (33, 1531, 31),
]


@pytest.fixture(params=LEVEL_NAMES)
def level_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    return make_ops("cpu", request.param, torch.float32, monkeypatch)


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 7)])
def test_a_weight_is_close_to_its_rounding(bits, steps):
    weight = torch.randn(40, 100)
    found = quantize(weight, bits).dequantized()
    if bits == 8:
        largest = weight.abs().amax(dim=1, keepdim=True).expand_as(weight)
    else:
        groups = F.pad(weight, (0, -100 % INT4_GROUP)).view(40, -1, INT4_GROUP)
        largest = groups.abs().amax(dim=2).repeat_interleave(INT4_GROUP, dim=1)[:, :100]
    assert ((found - weight).abs() <= largest / steps * 1.01).all()
    assert (found - weight).abs().mean() < largest.mean() / steps / 2


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_zeros_stay_zero(bits):
    weight = torch.cat([torch.zeros(2, 70), torch.ones(1, 70)])
    quantized = quantize(weight, bits)
    assert not quantized.dequantized()[:2].any()
    assert torch.equal(quantized.dequantized()[2], weight[2])


def test_the_largest_weight_of_a_group_has_the_value_of_one_more_step():
    weight = torch.linspace(-1.5, 3.5, INT4_GROUP)[None]
    quantized = quantize(weight, 4)
    assert quantized.values[0, -1] == -8
    assert quantized.scales.item() == -3.5 / 8


def test_values_and_scales_must_fit_together():
    values, scales = torch.zeros(3, 40, dtype=torch.int8), torch.ones(3)
    assert QuantizedWeight(values, scales, 8).shape == (3, 40)
    halves = torch.ones(3, 2, dtype=torch.float16)
    assert QuantizedWeight(values, halves, 4).shape == (3, 40)
    for wrong, error, message in [
        ((values, scales, 5), ValueError, "bits is 5"),
        ((values, scales[:2], 8), ValueError, "scales has shape"),
        ((values, scales, 4), TypeError, "scales is torch.float32"),
        ((values.short(), scales, 8), TypeError, "values is torch.int16"),
        ((values.T, scales, 8), ValueError, "scales has shape|not contiguous"),
        ((values + 8, halves, 4), ValueError, "-8..7"),
        ((values[0], scales, 8), ValueError, r"not \[N, K\]"),
        ((values, halves * float("inf"), 4), ValueError, "finite"),
        ((torch.zeros(1, (1 << 17) + 1, dtype=torch.int8), scales[:1], 8), ValueError, "input features"),
    ]:
        with pytest.raises(error, match=message):
            QuantizedWeight(*wrong)


def test_rows_are_rounded_to_even_and_odd_rows_are_defined():
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0] * 4, [1e-38] * 4, [1.0, float("nan"), 0, 0], [float("inf")] * 4])
    values, scales = quantize_rows(x)
    assert values.tolist() == [[127, 0, 2, -2], [0] * 4, [0] * 4, [0] * 4, [0] * 4]
    assert scales[:3].tolist() == [1.0, 0.0, 0.0]
    assert scales[3:].isnan().all()


@pytest.mark.parametrize("groups", [1, 3, 18, 448, 4096])
def test_multipliers_of_groups_are_close_to_the_scales_and_within_their_bounds(groups):
    scales = (torch.randn(20, groups) * torch.logspace(-4, 2, 20)[:, None]).half()
    scales[0], scales[1], scales[2, 1:] = 0, 2.0**-24, 0
    multipliers, columns = group_multipliers(scales)
    assert int(multipliers.abs().max()) <= MAX_MULTIPLIER
    assert int(multipliers.long().abs().sum(dim=1).max()) <= MAX_MULTIPLIER_SUM
    assert not multipliers[0].any()
    assert columns[0] == 0
    found = multipliers.double() * columns.double()[:, None]
    # Half a step of the multipliers, whose average is the bound of their sum over the number of groups.
    largest, mean = scales.double().abs().amax(dim=1), scales.double().abs().mean(dim=1)
    step = torch.maximum(largest / MAX_MULTIPLIER, mean * groups / (MAX_MULTIPLIER_SUM - groups))
    assert ((found - scales.double()).abs() <= 0.6 * step[:, None] + 1e-3 * scales.abs()).all()
    equal = torch.full((1, groups), 0.3, dtype=torch.float16)
    multipliers, columns = group_multipliers(equal)
    torch.testing.assert_close(multipliers.float() * columns[:, None], equal.float(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("t", "k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_have_the_bits_of_the_definition(level_ops, bits, t, k, n, with_bias):
    x, weight = torch.randn(t, k), quantize(torch.randn(2 * n, k), bits)
    bias = torch.randn(2 * n) if with_bias else None
    expected = quantized_linear(x, weight, bias)
    packed = level_ops.pack_linear(weight, bias)
    assert same_bits(level_ops.linear(x, packed), expected)
    assert same_bits(level_ops.linear_logits(x, packed), expected)
    gate, up = expected.chunk(2, dim=-1)
    actual = level_ops.linear_silu_mul(x, level_ops.pack_gate_up(weight, bias))
    torch.testing.assert_close(actual, F.silu(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("bits", "relative"), [(8, 0.02), (4, 0.12)])
def test_products_are_close_to_those_of_the_weights(level_ops, bits, relative):
    x, weight = torch.randn(20, 640), torch.randn(48, 640)
    exact = x.double() @ weight.double().T
    error = level_ops.linear(x, level_ops.pack_linear(quantize(weight, bits))).double() - exact
    assert error.norm() < relative * exact.norm()
    # The rounding of rows alone: against the rounded weights in float64.
    rounded = x.double() @ quantize(weight, bits).dequantized().double().T
    error = level_ops.linear(x, level_ops.pack_linear(quantize(weight, bits))).double() - rounded
    assert error.norm() < 0.01 * rounded.norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_values_do_not_saturate(level_ops, bits):
    k = 4096
    lowest = -128 if bits == 8 else -8
    for sign in (1, -1):
        values = torch.full((33, k), lowest, dtype=torch.int8)
        values[1::2] = -lowest - 1
        scales = torch.ones(33) if bits == 8 else torch.ones(33, k // INT4_GROUP, dtype=torch.float16)
        weight = QuantizedWeight(values, scales, bits)
        x = torch.full((3, k), 127.0 * sign)
        out = level_ops.linear(x, level_ops.pack_linear(weight))
        assert same_bits(out, quantized_linear(x, weight))
        # float32 rounds the product of a multiplier and the scale of a column.
        torch.testing.assert_close(out, x @ values.float().T, rtol=0 if bits == 8 else 1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_with_edges(level_ops, bits):
    x = torch.randn(6, 100)
    x[0], x[1], x[2, 7], x[3, 99], x[4] = 0, 1e-38, float("nan"), -float("inf"), torch.randn(100) * 3e36
    weight, bias = quantize(torch.randn(40, 100), bits), torch.randn(40)
    out = level_ops.linear(x, level_ops.pack_linear(weight, bias))
    assert torch.equal(out[:2], bias.expand(2, -1))
    assert out[2:4].isnan().all()
    assert same_bits(out[4:], quantized_linear(x[4:], weight, bias))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("k", [200, 1531])
def test_a_row_has_the_same_bits_in_any_batch(level_ops, bits, k):
    packed = level_ops.pack_linear(quantize(torch.randn(100, k), bits))
    x = torch.randn(70, k)
    together = level_ops.linear(x, packed)
    for count in range(1, 70, 3):
        assert same_bits(level_ops.linear(x[:count], packed), together[:count])
    for row in (0, 13, 69):
        assert same_bits(level_ops.linear(x[row : row + 1], packed), together[row : row + 1])


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_weights_have_the_bits_that_they_say(level_ops, bits):
    weight = torch.randn(64, 640)
    packed = level_ops.pack_linear(quantize(weight, bits))
    per_weight = packed.nbytes * 8 / weight.numel()
    assert per_weight == (8 if bits == 8 else 4.5) + 32 / 640


def test_kernels_without_quantised_weights_refuse_them(cpu_ops):
    weight = quantize(torch.randn(32, 64), 8)
    if cpu_ops.quantized_bits:
        assert cpu_ops.pack_linear(weight).out_features == 32
        return
    with pytest.raises(TypeError, match="8 bits"):
        cpu_ops.pack_linear(weight)
