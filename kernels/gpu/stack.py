"""Layers and caches of the Triton kernels: what a step needs of them, checked and prepared once."""

import torch

from quire.kernels.gpu.few_rows.layers import fits
from quire.kernels.gpu.kernel_table import KernelTable
from quire.kernels.gpu.supported import check_cache_shape, check_group
from quire.kernels.stack import Caches, Stack


class TritonCaches:
    """The checked caches of all layers, and the mover of their blocks."""

    def __init__(self, stack: Caches, dtype: torch.dtype, kv_dtype: torch.dtype, kernels: KernelTable) -> None:
        shape = stack.check_caches(None, kv_dtype)
        check_cache_shape(shape[2], shape[3], dtype)
        self.num_blocks, self.block_shape = stack.num_blocks, stack.block_shape
        self._kept = stack
        self.mover = kernels.block_mover(stack.tensors)


class TritonStack:
    """The checked layers and caches of a decoder."""

    def __init__(self, stack: Stack, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self.hidden = stack.check(dtype, kv_dtype)
        stack.check_packing(dtype)
        for k, _ in stack.kv_cache:
            check_cache_shape(k.shape[2], k.shape[3], dtype)
            check_group(stack.num_heads, k.shape[1], k.shape[3], dtype)
        self.num_blocks, _, self.block_size, _ = stack.kv_cache[0][0].shape
        self.stack = stack
        self.fits_few_rows = fits(stack)
