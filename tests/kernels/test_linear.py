"""Linear layers: any shape, with and without bias, the activation and the logits, and their weights."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.cpu import linear
from quire.kernels.fp8_rows import channel_scales, fp8_linear, quantize_rows
from quire.kernels.grouped_weight import FP8, UINT4, UINT8, GroupedWeight, grouped_rows, to_fp8
from quire.kernels.k_quant_weight import K_QUANT6, k_quant_part, k_quant_rows
from quire.kernels.moe import Routing
from quire.kernels.quantization import QuantizedWeight, quantize
from quire.kernels.reference_linear import ReferenceLinear, ReferenceMoE, reference_moe
from quire.kernels.weights import LinearWeight, Ranges, RowsDiffer, WeightRows, whole
from tests.kernels.test_grouped_weight import random_weight
from tests.kernels.test_k_quant_weight import random_weight as random_k_quant
from tests.support.kernels.oracle import assert_close, slack

# --- linear layers: any shape, with and without bias, the activation and the logits -----------------------------------

SHAPES = [
    (1, 1, 1),
    (1, 64, 32),
    (2, 77, 33),
    (5, 576, 48),
    (12, 31, 100),
    (13, 200, 65),
    (29, 130, 257),
    (150, 96, 40),
]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize(("t", "k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_the_product_of_rows_and_columns(ops, t, k, n, with_bias):
    x, weight = random(t, k, dtype=ops.dtype), random(n, k, dtype=ops.dtype)
    bias = random(n, dtype=ops.dtype) if with_bias else None
    packed = ops.pack_linear(weight.clone(), None if bias is None else bias.clone())
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    scale = x.double().abs() @ weight.double().abs().T / k**0.5 + 1
    assert (packed.in_features, packed.out_features) == (k, n)
    assert packed.nbytes >= weight.nbytes
    assert_close(ops.linear(x, packed), exact, scale)
    logits = ops.linear_logits(x, packed)
    assert logits.dtype == torch.float32
    assert_close(logits, exact, scale)


@pytest.mark.parametrize(("t", "k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gate_and_up_go_through_silu_and_product(ops, t, k, n, with_bias):
    x, weight = random(t, k, dtype=ops.dtype), random(2 * n, k, dtype=ops.dtype) / k**0.5
    bias = random(2 * n, dtype=ops.dtype) if with_bias else None
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if ops.dtype != torch.float32:  # the definition rounds gate and up, so that is where the exact result starts
        wide = wide.to(ops.dtype).double()
    gate, up = wide.chunk(2, dim=-1)
    actual = ops.linear_silu_mul(x, ops.pack_gate_up(weight, bias))
    # A sum that lies between two 16-bit values may round the other way.
    terms = 1 + (gate * up).abs() if ops.dtype == torch.float32 else slack(ops.dtype, 300) * (1 + up.abs() + gate.abs())
    assert_close(actual, F.silu(gate) * up, terms, rounds=2)


def test_gelu_of_gates_is_multiplied_with_ups(ops):
    x, weight = random(5, 40, dtype=ops.dtype), random(2 * 24, 40, dtype=ops.dtype) / 40**0.5
    wide = F.linear(x.double(), weight.double())
    if ops.dtype != torch.float32:
        wide = wide.to(ops.dtype).double()
    gate, up = wide.chunk(2, dim=-1)
    actual = ops.linear_gelu_mul(x, ops.pack_gate_up(weight))
    terms = 1 + (gate * up).abs() if ops.dtype == torch.float32 else slack(ops.dtype, 300) * (1 + up.abs() + gate.abs())
    assert_close(actual, F.gelu(gate, approximate="tanh") * up, terms, rounds=2)


def test_out_is_filled_and_returned(ops):
    x, packed = random(3, 40, dtype=ops.dtype), ops.pack_linear(random(24, 40, dtype=ops.dtype))
    out = torch.full((3, 24), float("nan")).to(ops.dtype)
    assert ops.linear(x, packed, out) is out
    assert torch.equal(out, ops.linear(x, packed))


def test_no_rows_give_no_rows(ops):
    packed = ops.pack_linear(random(24, 40, dtype=ops.dtype))
    assert ops.linear(random(0, 40, dtype=ops.dtype), packed).shape == (0, 24)


def test_large_values_saturate_without_nan(ops):
    gate_up = torch.tensor([[1.0], [1.0]]).to(ops.dtype)
    largest = 200.0 if ops.dtype == torch.float16 else 1e4  # its square must be finite
    x = torch.tensor([[-largest], [-100.0], [0.0], [100.0], [largest]]).to(ops.dtype)
    out = ops.linear_silu_mul(x, ops.pack_gate_up(gate_up)).flatten().double()
    values = x.flatten().double()
    torch.testing.assert_close(out, F.silu(values) * values, rtol=2**-6, atol=1e-30)


def test_weights_of_another_kind_are_refused(cpu_ops):
    x, weight = random(3, 40, dtype=cpu_ops.dtype), random(24, 40, dtype=cpu_ops.dtype)
    with pytest.raises(ValueError, match="pack_gate_up"):
        cpu_ops.linear(x, cpu_ops.pack_gate_up(weight))
    with pytest.raises(ValueError, match="pack_gate_up"):
        cpu_ops.linear_silu_mul(x, cpu_ops.pack_linear(weight))


def test_wrong_arguments_are_refused(ops):
    weight = random(24, 40, dtype=ops.dtype)
    packed = ops.pack_linear(weight)
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        ops.linear(torch.zeros(3, 40, dtype=torch.float64), packed)
    with pytest.raises(ValueError, match="x has shape"):
        ops.linear(random(3, 41, dtype=ops.dtype), packed)
    with pytest.raises(ValueError, match="x is not contiguous"):
        ops.linear(random(40, 3, dtype=ops.dtype).T, packed)
    with pytest.raises(TypeError, match="weight"):
        ops.pack_linear(weight.double())
    with pytest.raises(ValueError, match="bias"):
        ops.pack_linear(weight, random(25, dtype=ops.dtype))
    with pytest.raises(ValueError, match="2I"):
        ops.pack_gate_up(random(23, 40, dtype=ops.dtype))


# --- weights that are read while they are packed have the panels of the same weights, packed at once ------------------

K = 256


def rows_of(weight: LinearWeight) -> WeightRows:
    """Return a weight as rows that are read."""

    def read(ranges: Ranges) -> LinearWeight:
        index = torch.cat([torch.arange(first, last) for first, last in ranges])
        if isinstance(weight, torch.Tensor):
            return weight[index]
        if isinstance(weight, QuantizedWeight):
            return QuantizedWeight(weight.values[index], weight.scales[index], weight.bits)
        if isinstance(weight, GroupedWeight):
            zeros = None if weight.zeros is None else weight.zeros[index]
            return GroupedWeight(weight.codes[index], weight.scales[index], weight.kind, zeros, weight.order)
        parts = [k_quant_part(weight, (slice(first, last),)) for first, last in ranges]
        return k_quant_rows([part for part in parts if part is not None])

    return WeightRows(weight.shape, read)


def weights(n: int, has_integers: bool) -> list[LinearWeight]:
    wide = torch.randn(n, K)
    ordered = random_weight(UINT4, n, K)
    order = torch.randperm(K).int()
    found: list[LinearWeight] = [
        random_weight(UINT8, n, K),
        GroupedWeight(ordered.codes, ordered.scales, UINT4, ordered.zeros, order),
        random_k_quant(K_QUANT6, n, K),
        to_fp8(wide),
        wide if has_integers else wide.bfloat16(),
    ]
    return [*found, quantize(wide, 8), quantize(wide, 4), wide.half()] if has_integers else found


@pytest.mark.parametrize("n", [34, 130, 200])
def test_the_panels_are_those_of_the_whole(cpu_ops, n, monkeypatch):
    monkeypatch.setattr(linear, "_CHUNK", 2 * 32 * K)  # two panels
    for weight in weights(n, cpu_ops.dtype is torch.float32):
        bias = torch.randn(n).to(cpu_ops.dtype)
        for pack in (cpu_ops.pack_linear, cpu_ops.pack_gate_up):
            once, read = pack(weight, bias), pack(rows_of(weight), bias)
            assert read.format is once.format
            assert torch.equal(read.weight, once.weight)
            assert torch.equal(read.bias, once.bias)
            assert (read.scales is None) == (once.scales is None)
            assert read.scales is None or torch.equal(read.scales, once.scales)
            assert read.order is once.order


def test_rows_of_several_kinds_are_refused(cpu_ops, monkeypatch):
    monkeypatch.setattr(linear, "_CHUNK", 1)
    kinds = {0: random_weight(UINT4, 32, K), 32: random_weight(UINT8, 32, K)}
    with pytest.raises(RowsDiffer, match="differ in their type, kind or order"):
        cpu_ops.pack_linear(WeightRows(torch.Size((64, K)), lambda ranges: kinds[ranges[0][0]]))


def test_the_whole_of_a_weight():
    plain = torch.randn(5, 3)
    assert whole(plain) is plain
    assert torch.equal(whole(rows_of(plain)), plain)
    joined = grouped_rows([random_weight(UINT4, 2, 32)])
    assert joined is not None
    assert whole(joined) is joined


# --- linear layers and experts in plain torch -------------------------------------------------------------------------


def plain_linear(x: torch.Tensor, packed: ReferenceLinear) -> torch.Tensor:
    return torch.nn.functional.linear(x, packed.weight, packed.bias)


def test_experts_are_added_up_with_their_weights() -> None:
    layers = [(ReferenceLinear(torch.randn(6, 4), None), ReferenceLinear(torch.randn(4, 3), None)) for _ in range(2)]
    packed = ReferenceMoE(Routing(2, 2, True), ReferenceLinear(torch.randn(2, 4), torch.zeros(2)), layers)
    assert (packed.hidden, packed.inner, packed.nbytes) == (4, 3, 4 * (2 * (24 + 12) + 10))
    x, ids, weights = torch.randn(5, 4), torch.tensor([[0, 1]] * 5), torch.tensor([[0.25, 0.75]] * 5)
    found = reference_moe(x, ids, weights, packed, plain_linear)

    def expert(gate_up: ReferenceLinear, down: ReferenceLinear) -> torch.Tensor:
        gate, up = plain_linear(x, gate_up).chunk(2, dim=-1)
        return plain_linear(torch.nn.functional.silu(gate) * up, down)

    torch.testing.assert_close(found, 0.25 * expert(*layers[0]) + 0.75 * expert(*layers[1]))


# --- rounding of activations to FP8 with a scale per row, and the weights that are multiplied with them ---------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_value_of_a_row_is_kept_and_the_rest_is_within_half_a_step(dtype):
    x = torch.randn(40, 300).to(dtype) * torch.logspace(-4, 3, 40)[:, None].to(dtype)
    codes, scales = quantize_rows(x)
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (40, 1))
    largest = x.float().abs().amax(dim=1)
    assert torch.equal(codes.float().abs().amax(dim=1), torch.full((40,), 448.0))
    torch.testing.assert_close(scales[:, 0] * 448, largest)
    # e4m3 has 3 bits after the first; below 2^-6 its steps are 2^-9.
    error = (codes.float() * scales - x.float()).abs()
    assert bool((error <= x.float().abs() / 16 + scales * 2.0**-10 + largest[:, None] * 1e-6).all())


def test_rows_of_zeros_and_of_tiny_values_have_finite_scales_and_nan_stays():
    x = torch.zeros(4, 64)
    x[1, 3] = 1e-44
    x[2, 5] = float("nan")
    x[3, 7] = float("inf")
    codes, scales = quantize_rows(x)
    assert bool((codes[:2].float() == 0).all())
    assert bool((scales[:2] > 0).all())
    assert bool(codes.float().isnan().any(dim=1)[2:].all())


def test_the_product_is_that_of_the_rounded_rows():
    x, weight, bias = torch.randn(5, 96), to_fp8(torch.randn(32, 96)), torch.randn(32)
    codes, scales = quantize_rows(x)
    exact = (codes.double() * scales.double()) @ weight.dequantized().double().T + bias.double()
    torch.testing.assert_close(fp8_linear(x, weight, bias).double(), exact, rtol=1e-5, atol=1e-5)
    unrounded = x @ weight.dequantized().T + bias
    assert float((exact - unrounded).abs().max()) > 1e-3


def test_only_weights_with_a_scale_per_channel_or_tensor_have_channel_scales():
    weight = to_fp8(torch.randn(32, 96))
    scales = channel_scales(weight)
    assert scales is not None
    assert torch.equal(scales, weight.scales[:, 1])
    of_tensor = replace(weight, scales=torch.full_like(weight.scales, 0.5))
    found = channel_scales(of_tensor)
    assert found is not None
    assert torch.equal(found, torch.full((32,), 0.5))
    blocks = weight.scales.clone()
    blocks[3, 2] *= 2
    assert channel_scales(replace(weight, scales=blocks)) is None
    for n, k in ((30, 96), (32, 72), (32, 48)):  # shapes that the product of torch does not take, or a short sum
        assert channel_scales(to_fp8(torch.randn(n, k))) is None
    order = torch.arange(95, -1, -1, dtype=torch.int32)
    assert channel_scales(replace(weight, order=order)) is None
    assert channel_scales(random_weight("uint8", 32, 96)) is None
    assert channel_scales(GroupedWeight(weight.codes, weight.scales, FP8)) is not None
