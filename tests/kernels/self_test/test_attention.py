"""The sequences of the cases of attention, and faults that are small on purpose."""

import pytest
import torch

from quire import kernels
from quire.kernels.self_test.attention import (
    DECODING,
    MIXED,
    SPLIT,
    TOLERANCE,
    AttentionInputs,
    attention_cases,
    fit,
    is_of,
)
from quire.kernels.self_test.cases import UNITS, deviation
from quire.kernels.self_test.inputs import FULL, QUICK, CaseInputs
from tests.kernels.self_test.conftest import ODD, PLAIN


def step(sequences, use=PLAIN, **types) -> AttentionInputs:
    return AttentionInputs(CaseInputs(kernels.ReferenceOps("cpu", **types), QUICK), use, 16, sequences)


def test_blocks_that_no_sequence_owns_hold_nan():
    inputs = step(MIXED)
    tables, lengths, starts = inputs.tables
    owned = torch.cat([row[: -(-int(n) // 16)] for row, n in zip(tables, lengths, strict=True)])
    assert len(owned.unique()) == len(owned) == inputs.num_blocks - 2
    spare = [block for block in range(inputs.num_blocks) if block not in owned]
    assert inputs.caches[0][spare].isnan().all()
    assert {int(row[-1]) for row in tables} <= {*spare}
    assert starts.tolist() == [0, 1, 2, 23, 93, 133]
    assert inputs.attend().isfinite().all()


@pytest.mark.parametrize("missing", [0, 350, 698])
def test_one_of_700_keys_left_out_deviates_more_than_any_rounding_in_bfloat16(missing):
    inputs = step([(700, 1)], dtype=torch.bfloat16)
    right = deviation(inputs.attend(), inputs.exact)
    assert right < 0.5 * TOLERANCE * UNITS[torch.bfloat16]
    block, offset = int(inputs.slots[missing]) // 16, int(inputs.slots[missing]) % 16
    inputs.caches[0][block, :, offset] = -100 * inputs.q.view(2, 2, 16).sum(dim=1)  # a key with no weight
    assert deviation(inputs.attend(), inputs.exact) > TOLERANCE * UNITS[torch.bfloat16]  # `exact` is kept


def test_rows_of_mixed_steps_go_to_the_kernel_that_computes_them():
    inputs = step(MIXED)
    rows = torch.arange(133.0)[:, None]
    (decoded,) = inputs.rows(rows, lambda *one: is_of("decode", *one))
    (prompts,) = inputs.rows(rows, lambda *one: is_of("prefill", *one))
    assert decoded.flatten().tolist() == [0, 1]
    assert len(prompts) == 131


def test_contexts_are_cut_to_those_of_the_model():
    assert fit(SPLIT, 100) == [(100, 1), (3, 1)]
    assert fit(MIXED, 16) == [(16, 1), (1, 1), (16, 16), (16, 16), (16, 16)]


def names(use, level, longest):
    inputs = CaseInputs(kernels.ReferenceOps(), level)
    return [case.name for case in attention_cases(inputs, [use], 16, longest)]


def test_a_window_has_cases_beyond_it_if_contexts_reach_so_far():
    assert "window, rows" in names(ODD, QUICK, 120)
    assert "window, rows" not in names(ODD, QUICK, 119)
    assert "window, rows" not in names(PLAIN, QUICK, 4096)
    assert "long extend" in names(PLAIN, FULL, 4096)


def test_a_model_of_one_token_has_no_prompts():
    assert names(PLAIN, QUICK, 1) == ["decode", "split decode", "mixed step, rows"]


def test_the_lengths_have_all_remainders_of_blocks_and_tiles():
    assert {length % 64 for length, _ in DECODING} >= {0, 1, 63}
