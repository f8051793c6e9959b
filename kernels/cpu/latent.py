"""The operations of a latent KV cache in C++: latent.h and attention.h. All operations are row-invariant."""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels import latent
from quire.kernels.checks import address, cache_width, no_such_blocks
from quire.kernels.cpu.linear import CpuLinear, LinearWeights
from quire.kernels.cpu.memory import Arena
from quire.kernels.cpu.ops import CpuOps
from quire.kernels.cpu.stack import CpuCaches
from quire.kernels.latent import LatentCaches


class CpuGroups:
    """The packed weights of some linear layers of one shape."""

    def __init__(self, weights: Tensor, dtype: torch.dtype, arena: Arena) -> None:
        self._layers = [CpuLinear(weight, None, False, dtype, arena) for weight in weights]  # which keep the memory
        self.groups, self.out_features, self.in_features = weights.shape
        self.table = (LinearWeights * self.groups)(*(layer.weights for layer in self._layers))
        self.nbytes = sum(layer.nbytes for layer in self._layers)


class CpuLatentOps:
    """The operations of `quire.kernels.latent` with the kernels and the types of a `CpuOps`."""

    def __init__(self, ops: CpuOps) -> None:
        self.dtype, self.kv_dtype, self._kv_type = ops.dtype, ops.kv_dtype, ops.kv_type
        self._functions, self._arena = ops.level.functions, Arena()

    def pack_groups(self, weights: Tensor) -> CpuGroups:
        latent.check_groups(weights, self.dtype)
        return CpuGroups(weights, self.dtype, self._arena)

    def linear_groups(self, x: Tensor, packed: latent.PackedGroups) -> Tensor:
        assert isinstance(packed, CpuGroups)
        latent.check_group_rows(x, packed.groups, packed.in_features, self.dtype)
        tokens, width = x.shape[1], packed.out_features
        out = torch.empty((packed.groups, tokens, width), dtype=self.dtype)
        self._functions.linear_groups(
            address(x), packed.groups, tokens, packed.in_features, ctypes.addressof(packed.table), width, address(out)
        )
        return out

    def alloc_latent_cache(self, num_blocks: int, block_size: int, width: int) -> Tensor:
        latent.check_sizes(block_size, width)
        shape = (num_blocks, 1, block_size, cache_width(width, self.kv_dtype))
        memory = self._arena.take(math.prod(shape) * self.kv_dtype.itemsize, apart=True)
        return memory.view(self.kv_dtype).view(shape)

    def plain_latent_cache(self, cache: Tensor) -> Tensor:
        blocks, _, block_size, d = latent.cache_shape(cache, self.kv_dtype)
        unit, group = 1 if self.kv_dtype is torch.float32 else 2, min(16, block_size)
        groups, width = (blocks, 1, block_size // group), cache.shape[3]
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[self.kv_dtype.itemsize]  # torch cannot join fp8
        stored = cache.view(integer).view(*groups, group * width)
        values = stored[..., : group * d].reshape(*groups, d // unit, group, unit).transpose(3, 4)
        scales = stored[..., group * d :].reshape(*groups, group, width - d)
        plain = torch.cat([values.reshape(*groups, group, d), scales], dim=-1).view(self.kv_dtype)
        return plain.view(cache.shape)

    def stack_latent_caches(self, caches: Sequence[Tensor]) -> CpuCaches:
        return CpuCaches(LatentCaches((), caches), self.kv_dtype)

    def cache_latent(self, rows: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
        blocks, _, block_size, width = latent.cache_shape(cache, self.kv_dtype)
        latent.check_rows(rows, slot_mapping, width, self.dtype)
        bad = self._functions.cache_latent(
            address(rows), address(slot_mapping), address(cache), rows.shape[0], blocks, block_size, width,
            slot_mapping.dtype is torch.int64, self._kv_type,
        )  # fmt: skip
        if bad:
            raise IndexError(latent.no_such_slot(bad - 1, slot_mapping, blocks * block_size))

    def latent_attention(
        self,
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        scale: float,
        value_dim: int,
        sliding_window: int = 0,
    ) -> Tensor:
        blocks, _, block_size, width = latent.cache_shape(cache, self.kv_dtype)
        tables = block_tables, seq_lens, query_start_loc
        latent.check_attention(q, width, value_dim, *tables, scale, sliding_window, self.dtype)
        tokens, heads, _ = q.shape
        out = torch.empty((tokens, heads, value_dim), dtype=self.dtype)
        bad = self._functions.latent_attention(
            address(q), address(cache), address(block_tables), address(seq_lens), address(query_start_loc),
            address(out), block_tables.shape[1], seq_lens.shape[0], tokens, blocks, heads, width, value_dim, block_size,
            sliding_window, scale, self._kv_type,
        )  # fmt: skip
        if bad:
            raise IndexError(no_such_blocks(bad - 1, blocks))
        return out
