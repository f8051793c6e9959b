"""Blocks in host memory, as bytes: on their way to a file or back, and the ones that are kept there."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from quire.worker.engine.paged_model import KVCache


class HostPool(Protocol):
    """Places for blocks in host memory."""

    num_places: int
    block_bytes: int

    def swap_out(self, blocks: list[int], places: list[int]) -> None:
        """Copy blocks of the cache to places, in the order of the device's operations."""

    def swap_in(self, places: list[int], blocks: list[int]) -> None:
        """Copy places to blocks of the cache, in the order of the device's operations."""

    def block(self, place: int) -> list[memoryview]:
        """Return the bytes of a place, writable. The device has copied what it was told to copy there."""
        ...


class CachePool:
    """The places for blocks of a KV cache of any type and shape, in the order of bytes that its kernels use."""

    def __init__(self, kv_cache: KVCache, num_places: int) -> None:
        self.num_places = num_places
        self._parts = [
            replace(part, host=part.ops.alloc_host_blocks(part.stack, num_places)) for part in kv_cache.uniform_parts
        ]
        hosts = [part.host for part in self._parts if part.host is not None]
        self._bytes = [host.view(num_places, -1).view(torch.uint8).numpy() for host in hosts]
        self.block_bytes = sum(rows.shape[1] for rows in self._bytes)

    def swap_out(self, blocks: list[int], places: list[int]) -> None:
        for part in self._parts:
            part.swap_out(blocks, places)

    def swap_in(self, places: list[int], blocks: list[int]) -> None:
        for part in self._parts:
            part.swap_in(places, blocks)

    def block(self, place: int) -> list[memoryview]:
        return [memoryview(rows[place]) for rows in self._bytes]
