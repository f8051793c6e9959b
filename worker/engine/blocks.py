"""Physical blocks of the KV cache: who has which, and which are free. Bookkeeping without tensors.

A sequence is a list of physical block ids, its block table; the token at position p lies in block `p // block_size`
of the table, slot `p % block_size`. Blocks of the prompt are taken when a sequence starts, then one more each time
all are full, so that a decoding sequence never holds more than one block that is partly empty (paper section 4.3).

Always: every block is either free or in exactly one table.
"""

from __future__ import annotations

from collections.abc import Iterable

from worker.engine.sequence import Sequence


class BlockError(AssertionError):
    """The bookkeeping contradicts itself: a defect of the engine, never of a request."""


class BlockManager:
    """Owns `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is the one whose memory is likeliest still in a cache.
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def missing(self, sequence: Sequence) -> int:
        """Blocks that the sequence lacks to hold K and V of all its tokens."""
        return max(0, self.blocks_for(len(sequence.token_ids)) - len(sequence.block_table))

    def can_allocate(self, sequence: Sequence, reserve: int = 0) -> bool:
        """Whether `allocate` would succeed and leave `reserve` blocks free."""
        return self.missing(sequence) + reserve <= len(self._free)

    def allocate(self, sequence: Sequence) -> None:
        """Give the sequence what it lacks. The caller has asked `can_allocate`."""
        for _ in range(self.missing(sequence)):
            sequence.block_table.append(self._free.pop())

    def free(self, sequence: Sequence) -> None:
        """Take all blocks of the sequence back, last first, so that the next one to start gets them in order."""
        self._free.extend(reversed(sequence.block_table))
        sequence.block_table.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise BlockError unless free and held blocks are all blocks, each once. `sequences`: all that hold blocks."""
        held = [block for sequence in sequences for block in sequence.block_table]
        if sorted(held + self._free) != list(range(self.num_blocks)):
            raise BlockError(
                f"{len(self._free)} free and {len(held)} held blocks are not the {self.num_blocks} blocks, each once"
            )
