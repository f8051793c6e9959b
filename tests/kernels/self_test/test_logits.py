"""Draws of the self-test are those of the definition, and keep a distance from every edge."""

import pytest
import torch

from quire import kernels
from quire.kernels.self_test.inputs import QUICK, CaseInputs
from quire.kernels.self_test.logits import PARAMETERS, draws, kept_mass, logits_cases
from tests.support.kernels.oracle import kept


@pytest.mark.parametrize("vocabulary", [1, 3, 300, 40_000])
def test_the_reference_draws_the_same_tokens_even_with_rounded_numbers(vocabulary):
    logits = torch.randn(len(PARAMETERS), vocabulary) * 4
    parameters, uniform, tokens = draws(logits)
    for factor in (0.9995, 1.0, 1.0005):
        assert torch.equal(kernels.ReferenceOps().sample(logits, *parameters, uniform * factor), tokens)
    assert vocabulary < 300 or tokens.any()


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_the_mass_is_that_of_the_definition(parameters):
    row = torch.randn(500) * 3
    mass = kept_mass(row, *parameters)
    torch.testing.assert_close(mass / mass.sum(), kept(row, *parameters), rtol=1e-9, atol=1e-12)


def test_small_vocabularies_have_all_cases():
    for vocabulary in (2, 5):
        for case in logits_cases(CaseInputs(kernels.ReferenceOps(), QUICK), vocabulary):
            assert len(case.run()) == len(case.expected())
