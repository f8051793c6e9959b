"""Argmax of the Triton kernels."""

import pytest
import torch


@pytest.mark.parametrize("vocabulary", [1, 17, 4097, 9000])
def test_argmax_takes_the_lowest_of_equals(ops, vocabulary):
    logits = torch.randint(-3, 3, (5, vocabulary)).float()
    assert ops.argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_argmax_compares_the_segments_of_a_row(ops):
    nan, lowest = float("nan"), float("-inf")
    logits = torch.randint(-3, 3, (5, 20000)).float()
    logits[0, [8191, 8192, 19999]] = 7.0
    logits[1, 19999] = 7.0
    logits[2, :8192] = nan
    logits[3] = lowest
    logits[3, 16384:] = nan
    logits[4] = lowest
    logits[4, 16390] = -1e30
    expected = [8191, 19999, 8192 + int(logits[2, 8192:].argmax()), 0, 16390]
    assert ops.argmax(logits).tolist() == expected
