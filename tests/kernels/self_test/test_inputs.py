"""Random inputs are the same in every process, and weights have the values that they are compared with."""

import pytest
import torch
import torch.nn.functional as F

from quire import kernels
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.self_test.inputs import QUICK, CaseInputs


def test_inputs_are_seeded():
    inputs = CaseInputs(kernels.ReferenceOps("cpu", torch.bfloat16), QUICK)
    first, again, other = (inputs.normal(3, 4, generator=inputs.generator(salt)) for salt in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype is torch.bfloat16
    assert inputs.integers(range(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["", "bfloat16", "float16", "int8", "int4", "uint4", "mxfp4", "fp8"])
def test_weights_of_each_kind_have_their_values(kind):
    ops = kernels.ReferenceOps()
    inputs = CaseInputs(ops, QUICK)
    weight, exact = inputs.weight(6, 70, kind, inputs.generator())
    assert exact.dtype is torch.float32
    assert 0.3 < exact.pow(2).mean().sqrt() * 70**0.5 < 3
    if isinstance(weight, torch.Tensor):
        assert torch.equal(weight.float(), exact)
        return
    if isinstance(weight, GroupedWeight):
        x = torch.randn(2, 70)
        torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight)), F.linear(x, exact))
    else:
        assert torch.equal(weight.dequantized(), exact)


def test_the_types_are_named():
    assert CaseInputs(kernels.ReferenceOps("cpu", torch.float16), QUICK).types == "float16"
    narrow = kernels.ReferenceOps("cpu", torch.bfloat16, torch.float8_e4m3fn)
    assert CaseInputs(narrow, QUICK).types == "bfloat16 with a cache in float8_e4m3fn"
