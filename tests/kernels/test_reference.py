"""The reference in float64, and where it computes in pieces."""

import torch
import torch.nn.functional as F

from quire import kernels


def test_sums_are_in_float64_for_float64():
    ops = kernels.ReferenceOps("cpu", torch.float64)
    x = torch.randn(3, 200, dtype=torch.float64)
    weight = torch.randn(200, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-9).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-9), expected, rtol=1e-14, atol=0)


def test_a_head_that_is_multiplied_in_pieces_gives_all_logits():
    ops = kernels.ReferenceOps("cpu", torch.bfloat16)
    weight, bias = torch.randn(20000, 8).bfloat16(), torch.randn(20000).bfloat16()
    x = torch.randn(2, 8).bfloat16()
    logits = ops.linear_logits(x, ops.pack_linear(weight, bias))
    torch.testing.assert_close(logits, F.linear(x.float(), weight.float(), bias.float()))


def test_packed_weights_are_those_that_were_given():
    packed = kernels.ReferenceOps().pack_linear(torch.zeros(6, 4), torch.zeros(6))
    assert (packed.in_features, packed.out_features, packed.nbytes) == (4, 6, 30 * 4)
