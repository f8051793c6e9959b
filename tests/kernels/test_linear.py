"""Linear layers: any shape, with and without bias, the activation and the logits."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels.oracle import assert_close, slack

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
