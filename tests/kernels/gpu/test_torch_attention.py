"""Attention in torch, in place of a kernel, on sequences of every kind."""

import pytest
import torch

from quire.kernels.gpu import attention, torch_attention
from tests.support.kernels.implementations import TRITON_DTYPES, make_triton_ops
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.paged import Paged

LENGTHS, QUERIES = [37, 150, 61, 3], [37, 1, 20, 3]


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [("decode", "prefill"), ("decode",), ("prefill",)], ids="-".join)
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


def test_rows_of_padding_are_zeros(monkeypatch):
    """A batch may be padded with sequences that have a query and no keys."""
    if not TRITON_DTYPES:
        pytest.skip("Triton is not installed")
    ops = make_triton_ops(torch.float32, monkeypatch)
    ops.check_ids = False
    ops.replace_kernel("decode")
    q, tables = torch.randn(2, 2, 16), torch.zeros(2, 1, dtype=torch.int32)
    caches = ops.alloc_kv_cache(1, 2, 16, 16)
    caches[1].fill_(3)
    lengths, starts = torch.tensor([0, 1]).int(), torch.tensor([0, 1, 2]).int()
    out = torch.full((2, 32), float("nan"))
    ops.paged_attention(q, *caches, tables, lengths, starts, 0.25, 0, out)
    assert out[0].tolist() == [0] * 32
    assert out[1].tolist() == [3] * 32
