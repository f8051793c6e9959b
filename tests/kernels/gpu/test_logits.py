"""Argmax of the Triton kernels."""

import pytest
import torch


@pytest.mark.parametrize("vocabulary", [1, 17, 4097, 9000])
def test_argmax_takes_the_lowest_of_equals(ops, vocabulary):
    logits = torch.randint(-3, 3, (5, vocabulary)).float()
    assert ops.argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
