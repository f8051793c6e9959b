"""Attention in torch, in place of a kernel, on sequences of every kind."""

import pytest
import torch

from quire.kernels.gpu import attention, torch_attention
from tests.support.kernels.implementations import TRITON_DTYPES, make_triton_ops
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.paged import Paged

LENGTHS, QUERIES = [37, 150, 61, 3], [37, 1, 20, 3]


@pytest.mark.parametrize("replaced", [("decode",), ("prefill",), ("decode", "prefill")], ids="-".join)
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_rows_are_those_of_exact_attention_with_some_kernels_in_torch(monkeypatch, dtype, replaced):
    ops = make_triton_ops(dtype, monkeypatch)
    for kernel in replaced:
        ops.replace_kernel(kernel)
        monkeypatch.setattr(attention, kernel, None)  # a call would fail
    monkeypatch.setattr(torch_attention, "MOST_SCORES", 4 * 61 * 7)  # seven queries at a time of the third sequence
    paged = Paged(ops, LENGTHS, QUERIES, 4, 2, 64, 16, 50, torch.linspace(-4, 8, 4), 2.5)
    for s, found in enumerate(paged.attend()):
        assert_close(found, paged.exact(s), slack(dtype, 2000))
    decoding = Paged(ops, LENGTHS, [1] * 4, 4, 2, 64)
    for s, found in enumerate(decoding.attend()):
        assert_close(found, decoding.exact(s), slack(dtype, 2000))
