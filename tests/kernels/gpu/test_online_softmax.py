"""The online softmax: a merge of two ranges of keys gives what one range gives."""

import math

import pytest
import torch

from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from quire.kernels.gpu.online_softmax import fold, merge

SIZE = 16


@triton.jit if ON_CUDA else InterpretedFunction
def halves_kernel(q, k, v, seen, out, scale, SIZE: tl.constexpr):
    """out = softmax(q k^T * scale, in base 2) v over 2 * SIZE keys: each half folded alone, then merged."""
    i = tl.arange(0, SIZE)
    square = i[:, None] * SIZE + i[None, :]
    queries = tl.load(q + square)
    low_most, low_total = tl.full([SIZE], float("-inf"), tl.float32), tl.zeros([SIZE], tl.float32)
    most, total, mixed = low_most, low_total, tl.zeros([SIZE, SIZE], tl.float32)
    for half in range(2):
        keys = tl.load(k + half * SIZE * SIZE + i[None, :] * SIZE + i[:, None])
        values = tl.load(v + half * SIZE * SIZE + square)
        mask = tl.load(seen + i[:, None] * 2 * SIZE + half * SIZE + i[None, :]) != 0
        empty = tl.zeros([SIZE, SIZE], tl.float32)
        a, b, c = fold(queries, keys, values, mask, low_most, low_total, empty, scale, 0.0, True, False, "ieee")
        most, total, mixed = merge(most, total, mixed, a, b, c)
    tl.store(out + square, mixed / tl.where(total > 0, total, 1.0)[:, None])


def test_two_ranges_of_keys_are_merged(ops):
    q, k, v = torch.randn(SIZE, SIZE), torch.randn(2 * SIZE, SIZE), torch.randn(2 * SIZE, SIZE)
    seen = torch.rand(SIZE, 2 * SIZE) < 0.5
    seen[3] = False  # no key at all
    seen[4, :SIZE], seen[5, SIZE:] = False, False
    seen[4, SIZE], seen[5, 0] = True, True
    out = torch.empty(SIZE, SIZE)
    halves_kernel[(1,)](q, k, v, seen.int(), out, 0.3, SIZE=SIZE)
    scores = (q @ k.T).double() * 0.3 * math.log(2)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(out.double(), weights @ v.double(), rtol=1e-5, atol=1e-5)
