"""The binary search of work lists."""

import pytest
import torch

from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from quire.kernels.gpu.search import owner

LANES = 64


@triton.jit if ON_CUDA else InterpretedFunction
def owner_kernel(starts, out, count, steps, STRIDE: tl.constexpr, LANES: tl.constexpr):
    at = tl.arange(0, LANES)
    tl.store(out + at, owner(starts, at, count, steps, STRIDE))


@pytest.mark.parametrize("starts", [[0], [0, 10], [0, 0, 3, 3, 7, 63], list(range(40))], ids=len)
@pytest.mark.parametrize("stride", [1, 3])
def test_an_index_belongs_to_the_last_start_at_or_before_it(ops, starts, stride):
    spread = torch.zeros(len(starts) * stride, dtype=torch.int32)
    spread[::stride] = torch.tensor(starts, dtype=torch.int32)
    out = torch.full((LANES,), -1, dtype=torch.int32)
    owner_kernel[(1,)](spread, out, len(starts), len(starts).bit_length(), STRIDE=stride, LANES=LANES)
    assert out.tolist() == [max(i for i, start in enumerate(starts) if start <= at) for at in range(LANES)]
