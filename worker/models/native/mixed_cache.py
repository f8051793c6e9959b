"""The KV cache of models whose layers differ in the number of heads, or in the width of a head.

All layers share one block table: block b holds the same tokens in every layer, and its size in bytes is the sum over
the layers. The kernels move blocks of caches of one shape with one call, so layers of one shape are a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.kernels import latent_ops
from quire.kernels.checks import cache_width
from quire.kernels.ops import CacheStack, Ops
from quire.worker.engine.paged_model import KVCache


class KVShape(NamedTuple):
    """The keys, or the values, of one token in one layer."""

    num_kv_heads: int
    width: int  # of a head


class LatentShape(NamedTuple):
    """The row of one token in one layer with a latent cache (`quire.kernels.latent`)."""

    width: int


LayerShape = KVShape | LatentShape


@dataclass(frozen=True, slots=True)
class MixedKVCache(KVCache):
    """The layers of all parts in the order of the model.

    `host` is that of the first part. `stack` is that of the first part, too, or of `Ops.stack_layers`.
    """

    parts: tuple[KVCache, ...] = ()

    @property
    def uniform_parts(self) -> tuple[KVCache, ...]:
        return self.parts

    def copy_blocks(self, src: list[int], dst: list[int]) -> None:
        for part in self.parts:
            part.copy_blocks(src, dst)

    def swap_out(self, src: list[int], dst: list[int]) -> None:
        for part in self.parts:
            part.swap_out(src, dst)

    def swap_in(self, src: list[int], dst: list[int]) -> None:
        for part in self.parts:
            part.swap_in(src, dst)


def alloc_layers(
    ops: Ops, shapes: Sequence[LayerShape], num_blocks: int, block_size: int, num_host_blocks: int = 0
) -> KVCache:
    """Allocate zeroed caches with a shape for each layer, and `num_host_blocks` in host memory."""
    layers = [_alloc(ops, shape, num_blocks, block_size) for shape in shapes]
    parts = []
    for shape in dict.fromkeys(shapes):
        alike = [layer for layer, own in zip(layers, shapes, strict=True) if own == shape]
        stack = _stack(ops, alike)
        host = ops.alloc_host_blocks(stack, num_host_blocks) if num_host_blocks else None
        parts.append(KVCache(alike, stack, ops, host))
    if len(parts) == 1:
        return parts[0]
    return MixedKVCache(layers, parts[0].stack, ops, parts[0].host, parts=tuple(parts))


def bytes_per_block(ops: Ops, shapes: Sequence[LayerShape], block_size: int) -> int:
    """Return the memory of a block in all layers, in bytes."""
    rows = sum(
        (2 * shape.num_kv_heads if isinstance(shape, KVShape) else 1) * cache_width(shape.width, ops.kv_dtype)
        for shape in shapes
    )
    return rows * block_size * ops.kv_dtype.itemsize


def _alloc(ops: Ops, shape: LayerShape, num_blocks: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(shape, KVShape):
        return ops.alloc_kv_cache(num_blocks, shape.num_kv_heads, block_size, shape.width)
    kernels = latent_ops(ops)
    assert kernels is not None
    cache = kernels.alloc_latent_cache(num_blocks, block_size, shape.width)
    return cache, cache


def _stack(ops: Ops, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CacheStack:
    if layers[0][0] is not layers[0][1]:
        return ops.stack_caches(layers)
    kernels = latent_ops(ops)
    assert kernels is not None
    return kernels.stack_latent_caches([layer[0] for layer in layers])
