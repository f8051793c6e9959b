"""Linear layers with the weights of torch: bias, `out`, and float32 results."""

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.gpu import linear
from quire.kernels.gpu.linear import TritonLinear


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_out_is_filled_and_the_bias_added(ops, with_bias, invariant):
    x, weight = torch.randn(5, 24), torch.randn(40, 24)
    packed = TritonLinear(weight, torch.randn(40) if with_bias else None)
    out = torch.full((5, 40), float("nan"))
    assert linear.linear(x, packed, out, invariant) is out
    torch.testing.assert_close(out, F.linear(x, weight, packed.bias), rtol=1e-4, atol=1e-5)
    assert torch.equal(linear.linear(x, packed, None, invariant), out)


@pytest.mark.parametrize("with_bias", [False, True])
def test_float32_results_are_not_rounded_in_between(ops, with_bias):
    x, weight = torch.randn(5, 24).bfloat16(), torch.randn(40, 24).bfloat16()
    bias = torch.randn(40).bfloat16() if with_bias else None
    found = linear.linear_float32(x, TritonLinear(weight, bias))
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_layer_knows_its_features_and_bytes():
    packed = TritonLinear(torch.zeros(6, 4).half(), torch.zeros(6).half(), gate_up=True)
    assert (packed.in_features, packed.out_features, packed.nbytes, packed.dtype) == (4, 6, 60, torch.float16)
