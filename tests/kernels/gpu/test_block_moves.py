"""Moves of blocks within the caches, to the host and back."""

import pytest
import torch

from tests.support.kernels.implementations import make_triton_ops
from tests.support.kernels.stacks import (
    BLOCKS,
    make_cache_stack,
)

pytestmark = pytest.mark.slow

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_blocks_move_within_the_caches_and_to_the_host_and_back(gpu_ops, monkeypatch, fp8):
    if fp8:
        gpu_ops = make_triton_ops(gpu_ops.dtype, monkeypatch, kv_dtype=FP8)
    stack, caches = make_cache_stack(gpu_ops, 2)

    def everything() -> torch.Tensor:
        return torch.stack([cache.view(torch.uint8).clone() for pair in caches for cache in pair])

    def ids(*values: int) -> torch.Tensor:
        return torch.tensor(values, device="cpu")

    expected = everything()
    gpu_ops.copy_blocks(stack, ids(3, 3, BLOCKS - 1), ids(4, 0, 7))
    expected[:, [4, 0, 7]] = expected[:, [3, 3, BLOCKS - 1]]
    assert torch.equal(everything(), expected)
    host = gpu_ops.alloc_host_blocks(stack, 5)
    host.view(torch.uint8).fill_(0xFF)
    gpu_ops.swap_out(stack, host, ids(2, 9), ids(4, 1))
    gpu_ops.swap_in(stack, host, ids(1, 4, 0), ids(11, 12, 13))
    expected[:, [11, 12]] = expected[:, [9, 2]]
    expected[:, 13] = 0xFF
    assert torch.equal(everything(), expected)
    assert (host[[0, 2, 3]].view(torch.uint8) == 0xFF).all()
