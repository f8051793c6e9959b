"""A stack of Triton layers refuses weights and caches that its kernels cannot use."""

import pytest
import torch

from quire.kernels.gpu.kernel_table import KernelTable
from quire.kernels.gpu.stack import TritonCaches
from quire.kernels.gpu.supported import Unsupported
from quire.kernels.stack import Caches
from tests.support.kernels.stacks import HEADS, HIDDEN, INNER, KV_HEADS, make_cache_stack, stack_arguments


def test_weights_that_were_packed_for_another_use_are_refused(ops):
    layers, final_norm, caches, cos_sin = stack_arguments(ops, [0])
    layers[0].gate_up = ops.pack_linear(torch.zeros(2 * INNER, HIDDEN))
    with pytest.raises(ValueError, match="gate_up was packed for another use"):
        ops.stack_layers(layers, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)


def test_caches_are_refused_that_no_kernel_reads():
    k, v = torch.zeros(2, 3, 1, 16, 320)
    with pytest.raises(Unsupported, match="head_dim is 320"):
        TritonCaches(Caches([(k, v)]), torch.float32, torch.float32, KernelTable())


def test_a_stack_moves_blocks_of_all_its_caches(ops):
    stack, caches = make_cache_stack(ops, 2)
    assert len(stack.mover.addresses) == 4
    assert stack.block_shape == (2, 2, *caches[0][0].shape[1:])
