"""Cases of rows name what a model uses, and notice a token or a slot that is wrong."""

import torch

from quire import kernels
from quire.kernels.self_test.cases import deviation
from quire.kernels.self_test.inputs import QUICK, CaseInputs
from quire.kernels.self_test.rows import rotation_cases, row_cases
from tests.kernels.self_test.conftest import ODD, PLAIN


def test_a_model_has_cases_of_what_it_uses():
    inputs = CaseInputs(kernels.ReferenceOps(), QUICK)
    assert [case.name for case in row_cases(inputs, 64, torch.float32, True)] == ["embedding", "norm"]
    assert [case.name for case in row_cases(inputs, 64, None, True)] == ["norm"]
    assert [case.name for case in row_cases(inputs, 64, None, False)] == []


def test_layers_that_rotate_alike_have_one_case_each():
    inputs = CaseInputs(kernels.ReferenceOps(), QUICK)
    from dataclasses import replace

    cases = [*rotation_cases(inputs, [PLAIN, replace(PLAIN, window=50), ODD], 16)]
    assert [case.name for case in cases] == ["rotation", "cache write"] * 2


def test_a_key_in_the_slot_of_another_token_is_noticed():
    class Shifted(kernels.ReferenceOps):
        def rope_and_cache(self, qkv, positions, cos_sin, slot_mapping, *rest):
            moved = slot_mapping.clone()
            moved[-2:] = slot_mapping[-2:].flip(0)
            return super().rope_and_cache(qkv, positions, cos_sin, moved, *rest)

    rotation, write = rotation_cases(CaseInputs(Shifted(), QUICK), [PLAIN], 16)
    assert max(map(deviation, rotation.run(), rotation.expected())) <= rotation.tolerance
    assert max(map(deviation, write.run(), write.expected())) > 10 * write.tolerance
