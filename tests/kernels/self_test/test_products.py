"""Which linear layers the levels cover, and how large experts are cut."""

from dataclasses import replace

import pytest
import torch

from quire import kernels
from quire.kernels.moe import GELU, Routing
from quire.kernels.self_test.cases import deviation
from quire.kernels.self_test.inputs import FULL, QUICK, CaseInputs
from quire.kernels.self_test.products import chosen, experts_cases, linear_cases, logits_case
from quire.kernels.self_test.uses import ExpertsUse, LinearUse

USES = [LinearUse(64, 48), LinearUse(96, 64), LinearUse(96, 64, "fp8"), LinearUse(64, 128, is_gate_up=True)]


def test_the_quick_level_takes_the_longest_sum_of_each_kind():
    assert chosen(USES * 2, QUICK) == [USES[1], USES[2], USES[3]]
    assert chosen(USES * 2, FULL) == USES


def test_products_of_every_kind_pass_and_a_wrong_row_does_not():
    inputs = CaseInputs(kernels.ReferenceOps(), QUICK)
    kinds = [LinearUse(96, 64, kind, has_bias=True) for kind in ("", "int8", "int4", "uint4", "mxfp4", "fp8")]
    cases = [*linear_cases(inputs, kinds, "silu"), logits_case(inputs, LinearUse(96, 300))]
    assert len(cases) == 7
    for case in cases:
        found, exact = case.run(), case.expected()
        assert max(map(deviation, found, exact)) <= case.tolerance
        found[-1][-1] *= 1.01
        assert deviation(found[-1], exact[-1]) > case.tolerance


@pytest.mark.parametrize("gate", ["silu", GELU])
def test_gates_have_the_activation_of_the_model(gate):
    inputs = CaseInputs(kernels.ReferenceOps(), QUICK)
    case = [*linear_cases(inputs, USES, gate)][-1]
    assert case.kernel == ("silu_mul" if gate == "silu" else "gelu_mul")
    assert max(map(deviation, case.run(), case.expected())) <= case.tolerance


def test_experts_are_cut_to_the_budget_but_not_their_number():
    inputs = CaseInputs(kernels.ReferenceOps("cpu", torch.bfloat16), QUICK)
    large = ExpertsUse(2880, 2880, Routing(32, 4, normalised=True), has_biases=True)
    (case,) = experts_cases(inputs, [large])
    assert case.shape.startswith("4 of 32 experts of 64 -> 32, ")
    assert max(map(deviation, case.run(), case.expected())) <= case.tolerance
    small = replace(large, hidden=64, inner=16)
    (case,) = experts_cases(inputs, [small])
    assert case.shape.startswith("4 of 32 experts of 64 -> 16, ")
