"""The contract of a latent KV cache (MLA of DeepSeek), which the reference and the C++ kernels fulfil.

The cache has one row per token and layer for all heads: the latent vector of which keys and values are made, and the
part of the keys that has positions. Attention over it is absorbed: queries are multiplied by the weights of the keys
before, and the result by the weights of the values after. So a row is the key of every head, and its first elements are
the value of every head.

Notation as in `quire.kernels.ops`; D: the width of a row, V: of a value. Both are multiples of 16, V <= D <= 640.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels import checks
from quire.kernels.ops import CacheStack
from quire.kernels.stack import Caches

MAX_LATENT_WIDTH, MAX_LATENT_VALUE = 640, 512


class PackedGroups(Protocol):
    """The weights of G linear layers of one shape."""

    @property
    def nbytes(self) -> int: ...


class LatentOps(Protocol):
    """The operations of a latent cache. Each fulfils what `quire.kernels.ops` says of errors and row invariance."""

    def pack_groups(self, weights: Tensor) -> PackedGroups:
        """Pack the weights [G, N, K] act of G linear layers."""

    def linear_groups(self, x: Tensor, packed: PackedGroups) -> Tensor:
        """Return x [G, T, K] times the weights of each group as [G, T, N] act, each as `Ops.linear`."""

    def alloc_latent_cache(self, num_blocks: int, block_size: int, width: int) -> Tensor:
        """Return a zeroed cache [num_blocks, 1, block_size, D] of `kv_dtype`, stored as `Ops.alloc_kv_cache` says."""

    def plain_latent_cache(self, cache: Tensor) -> Tensor:
        """Return a copy in the order that the shape says, as `Ops.plain_kv_cache`."""

    def stack_latent_caches(self, caches: Sequence[Tensor]) -> CacheStack:
        """Check the caches of all layers once, for `Ops.copy_blocks` and the other moves of blocks."""

    def cache_latent(self, rows: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
        """Write rows [T, D] act to their slots [T] int32 or int64; -1: not kept."""

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
        """Return causal attention over the cache, [T, H, V] act.

        q [T, H, D]; value_dim: V. Other arguments, and what a query sees, as for `Ops.paged_attention`.
        """


@dataclass(frozen=True)
class LatentCaches(Caches):
    """The latent caches of all layers, for the moves of blocks: one tensor per layer, and no pairs."""

    caches: Sequence[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return list(self.caches)

    @property
    def num_blocks(self) -> int:
        return self.caches[0].shape[0]

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of one block over all caches: [layers, 1, 1, block_size, D]."""
        return len(self.caches), 1, *self.caches[0].shape[1:]

    def check_caches(self, kv_heads: int | None, dtype: torch.dtype) -> torch.Size:
        if not self.caches:
            raise ValueError("a stack has at least one layer")
        shapes = [cache_shape(cache, dtype) for cache in self.caches]
        for index, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ValueError(f"the cache of layer {index} does not have the shape of that of layer 0")
        return shapes[0]


def check_sizes(block_size: int, width: int) -> None:
    """Check that the contract allows latent caches of this block size and width."""
    checks.cache_shape(block_size, 16)
    if width % 16 or not 16 <= width <= MAX_LATENT_WIDTH:
        raise ValueError(
            f"the width of a latent row is {width}: it must be a multiple of 16, at most {MAX_LATENT_WIDTH}"
        )


def cache_shape(cache: Tensor, dtype: torch.dtype) -> torch.Size:
    """Check a cache, and return [blocks, 1, block_size, D]."""
    shape = cache.shape
    if len(shape) != 4 or shape[1] != 1:
        raise ValueError(f"cache has shape {tuple(shape)}, not [blocks, 1, block_size, D]")
    checks.tensor("cache", cache, dtype, shape)
    if dtype is torch.int8:
        shape = torch.Size((*shape[:3], shape[3] - checks.SCALE_BYTES))
    check_sizes(shape[2], shape[3])
    return shape


def check_groups(weights: Tensor, dtype: torch.dtype) -> None:
    """Check the weights of `pack_groups`."""
    if weights.dim() != 3 or 0 in weights.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}, not [G, N, K]")
    checks.tensor("weights", weights, dtype, weights.shape)


def check_group_rows(x: Tensor, groups: int, width: int, dtype: torch.dtype) -> None:
    """Check x of `linear_groups`."""
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}, not [{groups}, T, {width}]")
    checks.tensor("x", x, dtype, (groups, x.shape[1], width))


def check_attention(
    q: Tensor,
    width: int,
    value_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int,
    dtype: torch.dtype,
) -> None:
    """Check the arguments of `latent_attention`, other than its cache, whose rows have this width."""
    checks.attention(q, 1, width, block_tables, seq_lens, query_start_loc, scale, window, dtype)
    if value_dim % 16 or not 16 <= value_dim <= min(width, MAX_LATENT_VALUE):
        most = min(width, MAX_LATENT_VALUE)
        raise ValueError(f"value_dim is {value_dim}: it must be a multiple of 16, at most {most}")


def check_rows(rows: Tensor, slots: Tensor, width: int, dtype: torch.dtype) -> None:
    """Check the arguments of `cache_latent`."""
    checks.tensor("rows", rows, dtype, (rows.shape[0], width))
    checks.integers("slot_mapping", slots, (rows.shape[0],))


def no_such_slot(token: int, slots: Tensor, slot_count: int) -> str:
    """Return the message for a token whose slot is out of range."""
    return f"token {token}: slot {int(slots[token])} of {slot_count} does not exist"
