"""Log-probabilities of the Triton kernels against the reference."""

import pytest
import torch

from quire import kernels


@pytest.mark.parametrize("vocabulary", [40, 4097])
def test_log_probabilities_are_exact_and_ordered(ops, vocabulary):
    logits = torch.randn(4, vocabulary).round(decimals=1) * 3
    logits[1, 5:] = float("-inf")
    logits[2, ::3] = float("nan")
    logits[3] *= 30
    values, ids = ops.top_logprobs(logits, 33)
    expected_values, expected_ids = kernels.ReferenceOps(ops.device).top_logprobs(logits, 33)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(values, expected_values, rtol=1e-6, atol=1e-12)
    for i in (0, 3, 32):
        assert torch.equal(ops.logprobs_of(logits, ids[:, i].contiguous()), values[:, i])


def test_log_probabilities_take_no_more_memory_where_rows_are_many(ops, monkeypatch):
    """The kernel makes the sort keys for a few rows at a time."""
    from quire.kernels.gpu import logprobs

    logits = torch.randn(7, 300)
    expected = ops.top_logprobs(logits, 5)
    monkeypatch.setattr(logprobs, "KEY_BYTES", 3 * 300 * 8)
    empty, sizes = torch.empty, []

    def watched(*args, **kwargs):
        made = empty(*args, **kwargs)
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", watched)
    values, ids = ops.top_logprobs(logits, 5)
    assert max(sizes) == 3 * 300 * 8
    assert torch.equal(values, expected[0])
    assert torch.equal(ids, expected[1])
