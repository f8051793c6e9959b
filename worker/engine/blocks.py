"""Physical blocks of the KV cache: who has which, what may be shared, and which are free. Bookkeeping without tensors.

A sequence is a list of physical block ids, its block table; the token at position p lies in block `p // block_size`
of the table, slot `p % block_size`. Three primitives carry every decoding method (paper section 5.2): `fork` lets a
child share its parent's blocks, `append` gives a sequence one more when all are full, `free` gives them back. Blocks
are counted by reference, and `make_writable` is the copy on write: who writes into a block that has other owners gets a
copy first, and the last owner writes in place (section 4.4).

    refs > 0    in block tables, or pinned
    refs = 0    cached: full, found by its hash, evicted when nothing else is free, the least recently used first
                free:   everything else

Full blocks are found by a hash chain: the hash of a block covers its tokens, all blocks before it, and the root, which
is made of model, adapter and salt. So equal hashes mean equal keys and values, whoever computed them.

Blocks can also live in host memory (section 4.5, swapping); a swapped group is there with all its sharing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.worker.engine.sequence import Sequence

HASH_BYTES = 16


class BlockError(AssertionError):
    """The bookkeeping contradicts itself: a defect of the engine, never of a request."""


class Copy(NamedTuple):
    """The contents of one block that must move before the step's tokens are written."""

    source: int
    target: int


class CachedPrefix(NamedTuple):
    """What the cache has of a sequence: blocks that hold its first `num_tokens` tokens."""

    blocks: list[int]
    num_tokens: int


@dataclass(slots=True)
class PinnedPrefix:
    """A prompt's beginning that an operator named: computed once, never evicted (paper section 4.4)."""

    name: str
    blocks: list[int]
    num_tokens: int


@dataclass(slots=True)
class BlockCounters:
    """What happened since the start, in blocks; prefixes in tokens."""

    forks: int = 0
    copies: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    evictions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(slots=True)
class _Tail:
    """The last, partly filled block of a pinned prefix."""

    token_ids: list[int]
    block: int


def cache_root(model: str, adapter: str = "", salt: str = "") -> bytes:
    """Where a hash chain starts: sequences share cached blocks only if all three are the same."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (model, adapter, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


@dataclass
class BlockManager:
    """Owns `num_blocks` blocks of `block_size` tokens on the device, and `num_host_blocks` in host memory."""

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    prefix_caching: bool = True
    counters: BlockCounters = field(default_factory=BlockCounters)
    pinned: list[PinnedPrefix] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ref_counts = [0] * self.num_blocks
        # Stacks: the block freed last is the one whose memory is likeliest still in a processor's cache.
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._free_host = list(range(self.num_host_blocks - 1, -1, -1))
        self._host_refs: Counter[int] = Counter()
        self._cached: OrderedDict[int, None] = OrderedDict()  # refs 0, least recently used first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._tails: dict[bytes, list[_Tail]] = {}

    # --- how much there is --------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be had: the free ones, and those that are only cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and that the prefix cache knows."""
        return len(self._cached)

    @property
    def num_free_host(self) -> int:
        return len(self._free_host)

    @property
    def num_pinned(self) -> int:
        return len({block for prefix in self.pinned for block in prefix.blocks})

    def known(self) -> set[int]:
        """Blocks that the prefix cache finds, in use or not."""
        return set(self._hash_of)

    def known_blocks(self) -> list[int]:
        """`known` in no order, and quicker."""
        return list(self._hash_of)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # --- fork, append, free -------------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """The child shares the blocks of the parent's first `num_tokens` tokens, all of which are computed."""
        count = self.blocks_for(num_tokens)
        child.block_table = parent.block_table[:count]
        for block in child.block_table:
            self.ref_counts[block] += 1
        child.num_computed = child.num_stored = num_tokens
        child.num_cached_blocks = min(parent.num_cached_blocks, num_tokens // self.block_size)
        child.block_hashes[: child.num_cached_blocks] = parent.block_hashes[: child.num_cached_blocks]
        self.counters.forks += 1

    def append(self, sequence: Sequence) -> None:
        """One more block at the end of the table. The caller has seen that one is free."""
        sequence.block_table.append(self._allocate())

    def append_to(self, sequences: list[Sequence]) -> list[int]:
        """`append` for each of the sequences; returns the blocks."""
        blocks = [self._allocate() for _ in sequences]
        for sequence, block in zip(sequences, blocks, strict=True):
            sequence.block_table.append(block)
        return blocks

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of the sequence, wherever they are. What is cached stays findable until it is evicted.

        The last block goes first: of a chain, the end is evicted before the beginning.
        """
        for block in reversed(sequence.block_table):
            self._release(block)
        sequence.block_table.clear()
        self._free_host_table(sequence)
        sequence.num_cached_blocks = 0

    # --- copy on write ------------------------------------------------------------------------------------------------

    def make_writable(self, sequence: Sequence, index: int) -> Copy | None:
        """Make the sequence the only owner of entry `index` of its table.

        The copy that must be done first, if there were other owners; it takes a free block. The last owner writes in
        place, and what the cache knew of the block is forgotten.
        """
        block = sequence.block_table[index]
        if self.ref_counts[block] == 1:
            self._forget(block)
            return None
        copy = Copy(block, self._allocate())
        self.ref_counts[block] -= 1
        sequence.block_table[index] = copy.target
        self.counters.copies += 1
        return copy

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence, num_tokens: int) -> CachedPrefix:
        """The longest part of the sequence's first `num_tokens` tokens that the cache has. Takes nothing."""
        blocks: list[int] = []
        if not self.prefix_caching and not self.pinned:
            return CachedPrefix(blocks, 0)
        size = self.block_size
        for index in range(num_tokens // size):
            block = self._block_of.get(self._hash(sequence, index))
            if block is None:
                break
            blocks.append(block)
        found = len(blocks) * size
        end = sequence.block_hashes[len(blocks) - 1] if blocks else sequence.group.cache_root
        best: _Tail | None = None
        for tail in self._tails.get(end, ()):
            length = len(tail.token_ids)
            if (
                found + length <= num_tokens
                and sequence.token_ids[found : found + length] == tail.token_ids
                and (best is None or length > len(best.token_ids))
            ):
                best = tail
        if best is not None:
            return CachedPrefix([*blocks, best.block], found + len(best.token_ids))
        return CachedPrefix(blocks, found)

    def can_start(self, prefix: CachedPrefix, num_tokens: int, reserve: int) -> bool:
        """Whether `start` would succeed and leave `reserve` blocks free."""
        return self.blocks_to_start(prefix, num_tokens) + reserve <= self.num_free

    def blocks_to_start(self, prefix: CachedPrefix, num_tokens: int) -> int:
        """How many fewer blocks are free once a sequence of `num_tokens` tokens has started behind a prefix."""
        idle = sum(1 for block in prefix.blocks if self.ref_counts[block] == 0)
        copied = 1 if prefix.num_tokens % self.block_size and num_tokens > prefix.num_tokens else 0
        return self.blocks_for(num_tokens) - len(prefix.blocks) + idle + copied

    def start(self, sequence: Sequence, prefix: CachedPrefix, num_tokens: int) -> None:
        """Give the sequence the blocks for `num_tokens` tokens, of which the prefix is there already."""
        for block in prefix.blocks:
            self._touch(block)
        sequence.block_table = [*prefix.blocks]
        for _ in range(self.blocks_for(num_tokens) - len(prefix.blocks)):
            sequence.block_table.append(self._allocate())
        sequence.num_stored = prefix.num_tokens
        sequence.num_cached_blocks = prefix.num_tokens // self.block_size

    def cache_full_blocks(self, sequence: Sequence, num_computed: int) -> None:
        """Make the full blocks of the sequence's first `num_computed` tokens findable. One that is known already stays
        with its first owner."""
        if not self.prefix_caching:
            return
        full = num_computed // self.block_size
        for index in range(sequence.num_cached_blocks, full):
            key, block = self._hash(sequence, index), sequence.block_table[index]
            if key not in self._block_of and block not in self._hash_of:
                self._block_of[key] = block
                self._hash_of[block] = key
        sequence.num_cached_blocks = max(full, sequence.num_cached_blocks)

    def pin(self, name: str, sequence: Sequence) -> PinnedPrefix:
        """Keep the blocks of a computed sequence for ever, its partly filled last one too."""
        size, count = self.block_size, sequence.num_computed
        prefix = PinnedPrefix(name, sequence.block_table[: self.blocks_for(count)], count)
        for block in prefix.blocks:
            self._touch(block)
        full = count // size
        for index in range(full):
            # A pinned prefix is found even where the cache is off, and in its own blocks: another's may be evicted.
            key, block = self._hash(sequence, index), prefix.blocks[index]
            if (other := self._block_of.get(key, block)) != block:
                del self._hash_of[other]
                if other in self._cached:
                    del self._cached[other]
                    self._free.append(other)
            self._block_of[key], self._hash_of[block] = block, key
        if count % size:
            end = sequence.block_hashes[full - 1] if full else sequence.group.cache_root
            tail = _Tail(sequence.token_ids[full * size : count], prefix.blocks[-1])
            self._tails.setdefault(end, []).append(tail)
        self.pinned.append(prefix)
        return prefix

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """The hash of block `index` of the sequence, all of whose tokens are known."""
        hashes, size = sequence.block_hashes, self.block_size
        while len(hashes) <= index:
            at = len(hashes)
            parent = hashes[-1] if hashes else sequence.group.cache_root
            tokens = array("I", sequence.token_ids[at * size : (at + 1) * size]).tobytes()
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=HASH_BYTES).digest())
        return hashes[index]

    # --- host memory --------------------------------------------------------------------------------------------------

    def can_swap_out(self, sequences: Collection[Sequence]) -> bool:
        return len({block for sequence in sequences for block in sequence.block_table}) <= len(self._free_host)

    def swap_out(self, sequences: Collection[Sequence]) -> list[Copy]:
        """Move the sequences to host memory. Returns the copies, from the device to the host; a block that several of
        them share moves once."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            sealed = sequence.num_cached_blocks
            table = []
            for block in sequence.block_table:
                if block not in moved:
                    moved[block] = self._free_host.pop()
                table.append(moved[block])
                self._host_refs[moved[block]] += 1
            self.free(sequence)
            sequence.host_table, sequence.num_cached_blocks = table, sealed
        self.counters.swapped_out += len(moved)
        return [Copy(device, host) for device, host in moved.items()]

    def blocks_to_swap_in(self, sequences: Collection[Sequence]) -> int:
        """How many fewer blocks are free after `swap_in`."""
        is_taken: dict[int, bool] = {}
        for sequence in sequences:
            for index, host in enumerate(sequence.host_table):
                if host not in is_taken:
                    block = self._known(sequence, index)
                    is_taken[host] = block is None or not self.ref_counts[block]
        return sum(is_taken.values())

    def swap_in(self, sequences: Collection[Sequence]) -> list[Copy]:
        """Bring the sequences back. Returns the copies, from the host to the device; what the prefix cache still has is
        not copied."""
        moved: dict[int, int] = {}
        copies = []
        for sequence in sequences:
            for index, host in enumerate(sequence.host_table):
                block = moved.get(host)
                if block is not None:
                    self.ref_counts[block] += 1
                elif (block := self._known(sequence, index)) is not None:
                    self._touch(block)
                else:
                    block = self._allocate()
                    copies.append(Copy(host, block))
                moved[host] = block
                sequence.block_table.append(block)
            self._free_host_table(sequence)
            # The copies come before anything is read: what they bring back may be found at once.
            sequence.num_cached_blocks = 0
            self.cache_full_blocks(sequence, sequence.num_computed)
        self.counters.swapped_in += len(copies)
        return copies

    def _known(self, sequence: Sequence, index: int) -> int | None:
        """The block of the prefix cache that is entry `index` of the sequence, if there is one."""
        if index >= sequence.num_computed // self.block_size or not (self.prefix_caching or self.pinned):
            return None
        return self._block_of.get(self._hash(sequence, index))

    def _free_host_table(self, sequence: Sequence) -> None:
        for block in sequence.host_table:
            self._host_refs[block] -= 1
            if not self._host_refs[block]:
                del self._host_refs[block]
                self._free_host.append(block)
        sequence.host_table = []

    # --- single blocks ------------------------------------------------------------------------------------------------

    def _allocate(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self.counters.evictions += 1
        self.ref_counts[block] = 1
        return block

    def _touch(self, block: int) -> None:
        if not self.ref_counts[block]:
            del self._cached[block]
        self.ref_counts[block] += 1

    def _forget(self, block: int) -> None:
        """No longer find the block by its hash."""
        if (key := self._hash_of.pop(block, None)) is not None:
            del self._block_of[key]

    def _release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block]:
            return
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise BlockError unless every block is accounted for. `sequences`: all that hold blocks, here or on the
        host."""
        sequences = list(sequences)
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        held.update(block for prefix in self.pinned for block in prefix.blocks)
        if any(held[block] != count for block, count in enumerate(self.ref_counts)):
            wrong = [(block, self.ref_counts[block], held[block]) for block in range(self.num_blocks)]
            raise BlockError(f"(block, counted, held) differ: {[one for one in wrong if one[1] != one[2]][:8]}")
        idle = sorted([*self._free, *self._cached])
        if idle != [block for block, count in enumerate(self.ref_counts) if not count]:
            raise BlockError(
                f"{len(self._free)} free and {len(self._cached)} cached blocks are not those without owner"
            )
        if any(block not in self._hash_of for block in self._cached):
            raise BlockError("a cached block has no hash")
        if {block: key for key, block in self._block_of.items()} != self._hash_of:
            raise BlockError("the index of hashes is not one to one")
        on_host = Counter(block for sequence in sequences for block in sequence.host_table)
        if on_host != self._host_refs:
            raise BlockError("the owners of host blocks are not those counted")
        if sorted([*self._free_host, *on_host]) != list(range(self.num_host_blocks)):
            raise BlockError("free and held host blocks are not all host blocks, each once")
