"""The table of experts for the C++ kernels."""

import pytest
import torch

from quire.kernels.moe import CLAMPED, ExpertWeights, Routing
from quire.kernels.quantization import quantize

HIDDEN, INNER = 40, 24


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5


def test_experts_of_several_formats_are_refused(cpu_ops):
    if not cpu_ops.quantized_bits:
        pytest.skip("quantised weights are for float32")
    router = cpu_ops.pack_linear(random(2, HIDDEN))
    experts = [ExpertWeights(random(2 * INNER, HIDDEN), quantize(random(HIDDEN, INNER), bits)) for bits in (8, 4)]
    with pytest.raises(ValueError, match="several formats in down: int4, int8"):
        cpu_ops.pack_moe(Routing(2, 1, True), router, experts)


def test_biases_of_experts_are_those_of_linear_layers(cpu_ops):
    """One expert with all rows is a gated MLP of gpt-oss."""
    dtype = cpu_ops.dtype
    gate_up, down = random(2 * INNER, HIDDEN).to(dtype), random(HIDDEN, INNER).to(dtype)
    biases = torch.randn(2 * INNER).to(dtype), torch.randn(HIDDEN).to(dtype)
    routing, router = Routing(1, 1, True, CLAMPED), cpu_ops.pack_linear(random(1, HIDDEN).to(dtype))
    packed = cpu_ops.pack_moe(routing, router, [ExpertWeights(gate_up, down, *biases)])
    x = torch.randn(5, HIDDEN).to(dtype)
    wide = torch.nn.functional.linear(x.float(), gate_up.float(), biases[0].float())
    gate, up = wide.chunk(2, dim=-1)
    inner = (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))
    expected = torch.nn.functional.linear(inner, down.float(), biases[1].float())
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(cpu_ops.moe(x, packed).float(), expected, rtol=tolerance, atol=tolerance)
