"""A layer with the heads of the model: its cases pass, and notice parts that do not fit together."""

from dataclasses import replace

import pytest
import torch

from quire import kernels
from quire.kernels.self_test.cases import deviation
from quire.kernels.self_test.inputs import QUICK, CaseInputs
from quire.kernels.self_test.layers import block_cases, layer_cases
from tests.kernels.self_test.conftest import ODD


def test_a_layer_has_the_adapters_of_the_model(uses):
    inputs = CaseInputs(kernels.ReferenceOps(), QUICK)
    assert [case.kernel for case in layer_cases(inputs, uses)] == ["layers", "lora"] * 2
    assert [case.kernel for case in layer_cases(inputs, replace(uses, has_adapters=False))] == ["layers"] * 2


def test_adapters_change_the_output(uses):
    plain, adapted = layer_cases(CaseInputs(kernels.ReferenceOps(), QUICK), replace(uses, attention=(ODD,)))
    assert deviation(adapted.run()[0], plain.run()[0]) > 0.3
    assert torch.equal(adapted.run()[0][0], plain.run()[0][0])  # the first sequence has no adapter


@pytest.mark.parametrize("kernel", ["rms_norm", "add_rms_norm", "paged_attention", "linear_silu_mul"])
def test_a_part_that_is_left_out_is_noticed(uses, kernel):
    class Broken(kernels.ReferenceOps):
        pass

    def zeros(self, *arguments: object, **options: object) -> torch.Tensor:
        return getattr(kernels.ReferenceOps, kernel)(self, *arguments, **options) * 0

    setattr(Broken, kernel, zeros)
    case = next(iter(layer_cases(CaseInputs(Broken("cpu", torch.bfloat16), QUICK), uses)))
    assert deviation(case.run()[0], case.expected()[0]) > case.tolerance


def test_blocks_are_copied_to_the_host_and_back():
    for kv_dtype in (None, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        inputs = CaseInputs(kernels.ReferenceOps("cpu", torch.float32, kv_dtype), QUICK)
        (case,) = block_cases(inputs, ODD, 16)
        assert all(map(torch.equal, case.run(), case.expected()))
