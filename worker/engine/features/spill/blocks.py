"""Blocks of an engine with a spill: evicted ones are noted, and come back into the prefix cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

from quire.worker.engine.blocks import BlockManager
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.sequence import Sequence


@dataclass
class SpillingBlockManager(BlockManager):
    """A block manager whose evicted blocks may be kept elsewhere.

    evicted: blocks that the prefix cache has evicted, with their hashes. Whoever takes them does so before a step
    overwrites them, and leaves the list empty.
    """

    evicted: list[tuple[int, bytes]] = field(default_factory=list)
    # Blocks that have lost their last owner and stayed in the prefix cache, the first first. Some may be gone by now.
    released: deque[int] = field(default_factory=deque)

    @classmethod
    def of(cls, limits: EngineLimits) -> Self:
        return cls(limits.num_blocks, limits.block_size, limits.num_host_blocks, limits.prefix_caching)

    def _note_evicted(self, block: int) -> None:
        self.evicted.append((block, self._hash_of[block]))

    def _release(self, block: int) -> None:
        super()._release(block)
        if block in self.cached:
            self.released.append(block)
            if len(self.released) > self.num_blocks:
                self.released.popleft()

    def take_released(self, count: int) -> list[tuple[int, bytes]]:
        """Take up to `count` blocks without owner from `released`, those that will be evicted first, with hashes."""
        taken = [self.released.popleft() for _ in range(min(count, len(self.released)))]
        return [(block, self._hash_of[block]) for block in taken if block in self.cached]

    def hashes(self, sequence: Sequence, first: int, end: int) -> Iterator[bytes]:
        """Iterate over the hashes of the blocks [first, end) of the sequence, whose tokens are all known."""
        return (self._hash(sequence, index) for index in range(first, end))

    def use(self, blocks: Iterable[int]) -> None:
        """Count blocks of the prefix cache as used now, so that others are evicted before them."""
        for block in blocks:
            if block in self.cached:
                self.cached.touch(block)

    def refill(self, key: bytes) -> int | None:
        """Take a block of the prefix cache, without owner, for the contents with this hash; the caller copies them.

        Returns None if the cache has these contents already, or if no block is free.
        """
        if key in self._block_of or not self.num_free:
            return None
        block = self._allocate()
        self.ref_counts[block] = 0
        self._block_of[key], self._hash_of[block] = block, key
        self.cached.add(block)
        return block

    def drop_cached(self, blocks: Iterable[int]) -> None:
        """Remove blocks without owner from the prefix cache, because their contents are not what their hashes say."""
        for block in blocks:
            self.cached.remove(block)
            self._forget(block)
            self._free.append(block)

    def findable(self) -> list[tuple[int, bytes]]:
        """Return the blocks of the prefix cache with their hashes: those with owners, then those used last first."""
        owned = [(block, key) for block, key in self._hash_of.items() if block not in self.cached]
        return owned + [(block, self._hash_of[block]) for block in reversed(self.cached)]
