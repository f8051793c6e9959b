"""Argument checks of TritonOps: the use of packed weights, ids on request, and host memory."""

import pytest
import torch

from quire import kernels
from tests.support.kernels.stacks import make_cache_stack


def test_weights_of_another_kind_are_refused(ops):
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    with pytest.raises(ValueError, match="pack_gate_up"):
        ops.linear(x, ops.pack_gate_up(weight))
    with pytest.raises(ValueError, match="pack_gate_up"):
        ops.linear_silu_mul(x, ops.pack_linear(weight))
    with pytest.raises(ValueError, match="pack_gate_up"):
        ops.linear(x, kernels.ReferenceOps().pack_linear(weight))


def test_ids_are_checked_only_on_request(ops):
    logits, ids = torch.randn(2, 8), torch.tensor([0, 8])
    with pytest.raises(IndexError, match=r"ids\[1\] is 8"):
        ops.logprobs_of(logits, ids)
    ops.check_ids = False
    assert ops.logprobs_of(logits, ids)[1].isnan()


def test_host_blocks_have_the_dtype_of_the_cache(ops):
    stack, caches = make_cache_stack(ops, 2)
    host = ops.alloc_host_blocks(stack, 3)
    assert host.shape == (3, 2, 2, *caches[0][0].shape[1:])
    assert (host.dtype, host.device.type) == (ops.kv_dtype, "cpu")
    with pytest.raises(TypeError, match="host is"):
        ops.swap_out(stack, host.half(), torch.tensor([0], device="cpu"), torch.tensor([0], device="cpu"))
