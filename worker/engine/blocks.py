"""Physical blocks of the KV cache: their owners, their sharing, and the free blocks. Bookkeeping without tensors.

A sequence has a block table, a list of physical block ids. The token at position p is in block `p // block_size` of the
table, slot `p % block_size`. Three primitives serve every decoding method (paper section 5.2): `fork` lets a child
share its parent's blocks, `append` adds a block when all are full, `free` returns them. Blocks are reference-counted,
and `make_writable` implements copy on write: a sequence that writes to a block with other owners gets a copy first, and
the last owner writes in place (section 4.4).

    ref_count > 0    in block tables, or pinned
    ref_count = 0    cached: full, and found by its hash; evicted when no block is free, least recently used first, and
                     after all others for a time if a call has pinned it (features/pins.py)
                     free:   all other blocks

The prefix cache finds full blocks by a hash chain: the hash of a block covers its tokens and images, all blocks before
it, and a root made of model and salt. So equal hashes mean equal keys and values, no matter which sequence computed
them. The scope of a sequence (its tenant) is part of the first hash after the pinned blocks, so tenants share pinned
prefixes and nothing else.

Blocks also exist in host memory (section 4.5, swapping). A swapped group keeps all its sharing there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.shared.protocol.messages import SHORT_TTL_S
from quire.worker.engine.features.pins import EvictionOrder
from quire.worker.engine.sequence import Sequence

HASH_BYTES = 16


class BlockError(AssertionError):
    """A contradiction in the bookkeeping: a defect of the engine, never of a request."""


class Copy(NamedTuple):
    """A copy of one block, or of one slot of recurrent states, due before the step writes its tokens."""

    source: int
    target: int


class CachedPrefix(NamedTuple):
    """Blocks of the cache that hold the first `num_tokens` tokens of a sequence."""

    blocks: list[int]
    num_tokens: int


@dataclass(slots=True)
class PinnedPrefix:
    """A prompt prefix named by the operator: computed once, never evicted (paper section 4.4)."""

    name: str
    blocks: list[int]
    num_tokens: int


@dataclass(slots=True)
class BlockCounters:
    """Counters since the start of the process, in blocks; `prefix_*` in tokens."""

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


def cache_root(model: str, salt: str = "", adapter: str = "") -> bytes:
    """Return the root of a hash chain. Sequences share cached blocks only if all arguments are equal.

    adapter: the digest of the LoRA adapter; empty without one.
    """
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (model, salt, adapter) if adapter else (model, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def cache_scope(name: str) -> bytes:
    """Return the part of a hash that separates scopes; empty for the scope without a name."""
    return hashlib.blake2b(name.encode(), digest_size=HASH_BYTES).digest() if name else b""


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
        # Stacks: the memory of the block freed last is the likeliest to be in a processor cache.
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._free_host = list(range(self.num_host_blocks - 1, -1, -1))
        self._host_refs: Counter[int] = Counter()
        self.cached = EvictionOrder()  # ref_count 0
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._tails: dict[bytes, list[_Tail]] = {}
        self._pinned_hashes: set[bytes] = set()

    # --- sizes --------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: the free ones, and the cached ones without owner."""
        return len(self._free) + len(self.cached)

    @property
    def num_cached(self) -> int:
        """Blocks of the prefix cache without owner."""
        return len(self.cached)

    @property
    def num_free_host(self) -> int:
        return len(self._free_host)

    @property
    def num_pinned(self) -> int:
        return len({block for prefix in self.pinned for block in prefix.blocks})

    def known(self) -> set[int]:
        """Return the blocks that the prefix cache finds, with or without owner."""
        return set(self._hash_of)

    def known_blocks(self) -> list[int]:
        """Return `known` as a list in arbitrary order, which takes less time."""
        return list(self._hash_of)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # --- fork, append, free -------------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Share the blocks of the parent's first `num_tokens` tokens, all computed, with the child."""
        count = self.blocks_for(num_tokens)
        child.block_table = parent.block_table[:count]
        for block in child.block_table:
            self.ref_counts[block] += 1
        child.num_computed = child.num_stored = num_tokens
        child.num_cached_blocks = min(parent.num_cached_blocks, num_tokens // self.block_size)
        child.block_hashes[: child.num_cached_blocks] = parent.block_hashes[: child.num_cached_blocks]
        self.counters.forks += 1

    def append(self, sequence: Sequence) -> None:
        """Allocate one more block at the end of the table. The caller has checked that one is free."""
        sequence.block_table.append(self._allocate())

    def append_to(self, sequences: list[Sequence]) -> list[int]:
        """Append one block to each of the sequences. Returns the blocks."""
        blocks = [self._allocate() for _ in sequences]
        for sequence, block in zip(sequences, blocks, strict=True):
            sequence.block_table.append(block)
        return blocks

    def trim(self, sequence: Sequence, count: int) -> None:
        """Free all blocks of the table but the first `count`."""
        while len(sequence.block_table) > count:
            self._release(sequence.block_table.pop())

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of the sequence, on the device and on the host. The prefix cache keeps its own until evicted.

        The last block is freed first, so that the end of a hash chain is evicted before its beginning.
        """
        for block in reversed(sequence.block_table):
            self._release(block)
        sequence.block_table.clear()
        self._free_host_table(sequence)
        sequence.num_cached_blocks = 0

    # --- copy on write ------------------------------------------------------------------------------------------------

    def make_writable(self, sequence: Sequence, index: int) -> Copy | None:
        """Make the sequence the only owner of entry `index` of its table.

        Returns the copy to do before the write if the block has other owners; the copy takes a free block. The last
        owner writes in place, and the prefix cache forgets the block.
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
        """Return the longest cached prefix of the sequence's first `num_tokens` tokens. Allocates nothing."""
        blocks: list[int] = []
        if not self.prefix_caching and not self.pinned:
            return CachedPrefix(blocks, 0)
        size = self.block_size
        for index in range(num_tokens // size):
            block = self._block_of.get(self._hash(sequence, index))
            if block is None:
                break
            blocks.append(block)
        num_found = len(blocks) * size
        end = sequence.block_hashes[len(blocks) - 1] if blocks else sequence.group.cache_root
        best: _Tail | None = None
        images = sequence.group.images
        for tail in self._tails.get(end, ()):
            length = len(tail.token_ids)
            if (
                num_found + length <= num_tokens
                and sequence.token_ids[num_found : num_found + length] == tail.token_ids
                and not (images and images.key(num_found, num_found + length))
                and (best is None or length > len(best.token_ids))
            ):
                best = tail
        if best is not None:
            return CachedPrefix([*blocks, best.block], num_found + len(best.token_ids))
        return CachedPrefix(blocks, num_found)

    def shares_block(self, sequence: Sequence, other: Sequence, index: int, num_tokens: int) -> bool:
        """Return whether two sequences would share block `index`, within `num_tokens` tokens, if both were cached."""
        is_whole = self.prefix_caching and (index + 1) * self.block_size <= num_tokens
        return is_whole and self._hash(sequence, index) == self._hash(other, index)

    def can_start(self, prefix: CachedPrefix, num_tokens: int, reserve: int) -> bool:
        """Return whether `start` would succeed and leave `reserve` blocks free."""
        return self.blocks_to_start(prefix, num_tokens) + reserve <= self.num_free

    def blocks_to_start(self, prefix: CachedPrefix, num_tokens: int) -> int:
        """Return how many free blocks it takes to start a sequence of `num_tokens` tokens on a prefix."""
        idle = sum(1 for block in prefix.blocks if self.ref_counts[block] == 0)
        copied = 1 if prefix.num_tokens % self.block_size and num_tokens > prefix.num_tokens else 0
        return self.blocks_for(num_tokens) - len(prefix.blocks) + idle + copied

    def start(self, sequence: Sequence, prefix: CachedPrefix, num_tokens: int) -> None:
        """Build the block table for `num_tokens` tokens: the blocks of the prefix, then new ones."""
        for block in prefix.blocks:
            self._touch(block)
        sequence.block_table = [*prefix.blocks]
        for _ in range(self.blocks_for(num_tokens) - len(prefix.blocks)):
            sequence.block_table.append(self._allocate())
        sequence.num_stored = prefix.num_tokens
        sequence.num_cached_blocks = prefix.num_tokens // self.block_size
        self.cached.renew(prefix.blocks)

    def cache_full_blocks(self, sequence: Sequence, num_computed: int) -> None:
        """Add the full blocks of the sequence's first `num_computed` tokens to the prefix cache.

        If the cache has a block of the same hash already, that block stays.
        """
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
        """Protect the blocks of a computed sequence from eviction, including a partly filled last one."""
        size, count = self.block_size, sequence.num_computed
        prefix = PinnedPrefix(name, sequence.block_table[: self.blocks_for(count)], count)
        for block in prefix.blocks:
            self._touch(block)
        full = count // size
        for index in range(full):
            # Found even if prefix caching is off, and in its own blocks: blocks of another sequence may be evicted.
            key, block = self._hash(sequence, index), prefix.blocks[index]
            if (other := self._block_of.get(key, block)) != block:
                del self._hash_of[other]
                if other in self.cached:
                    self.cached.remove(other)
                    self._free.append(other)
            self._block_of[key], self._hash_of[block] = block, key
            self._pinned_hashes.add(key)
        if count % size:
            end = sequence.block_hashes[full - 1] if full else sequence.group.cache_root
            tail = _Tail(sequence.token_ids[full * size : count], prefix.blocks[-1])
            self._tails.setdefault(end, []).append(tail)
        self.pinned.append(prefix)
        return prefix

    def pin_breakpoints(self, sequence: Sequence) -> None:
        """Pin the full blocks of a computed prompt up to its cache breakpoints, and count the tokens of those that the
        request has computed, not found.
        """
        group, size = sequence.group, self.block_size
        ends = [(min(point.position, len(group.prompt)) // size, point.ttl_s) for point in group.breakpoints]
        group.breakpoints = ()
        ttls = [max(ttl for end, ttl in ends if index < end) for index in range(max(end for end, _ in ends))]
        found = [self._block_of.get(self._hash(sequence, index)) for index in range(len(ttls))]
        blocks = [block for block in found if block is not None]
        if len(blocks) < len(ttls):  # prefix caching is off
            return
        self.cached.pin(blocks, ttls, group.pinned_for)
        written = [
            ttl
            for index, (block, ttl) in enumerate(zip(blocks, ttls, strict=True))
            if index * size >= group.num_cached_tokens and self.cached.is_pinned(block)
        ]
        short = sum(ttl <= SHORT_TTL_S for ttl in written)
        group.pinned_tokens = short * size, (len(written) - short) * size

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """Return the hash of block `index` of the sequence. All its tokens are known."""
        hashes, size = sequence.block_hashes, self.block_size
        while len(hashes) <= index:
            at = len(hashes)
            parent = hashes[-1] if hashes else sequence.group.cache_root
            tokens = array("I", sequence.token_ids[at * size : (at + 1) * size]).tobytes()
            if (images := sequence.group.images) is not None:
                tokens += images.key(at * size, (at + 1) * size)
            key = hashlib.blake2b(parent + tokens, digest_size=HASH_BYTES).digest()
            scope = sequence.group.cache_scope
            if scope and key not in self._pinned_hashes and (not hashes or parent in self._pinned_hashes):
                key = hashlib.blake2b(parent + scope + tokens, digest_size=HASH_BYTES).digest()
            hashes.append(key)
        return hashes[index]

    # --- host memory --------------------------------------------------------------------------------------------------

    def can_swap_out(self, sequences: Collection[Sequence]) -> bool:
        return len({block for sequence in sequences for block in sequence.block_table}) <= len(self._free_host)

    def swap_out(self, sequences: Collection[Sequence]) -> list[Copy]:
        """Move the sequences to host memory. Returns the copies from device to host; a shared block is copied once."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            num_cached_blocks = sequence.num_cached_blocks
            table = []
            for block in sequence.block_table:
                if block not in moved:
                    moved[block] = self._free_host.pop()
                table.append(moved[block])
                self._host_refs[moved[block]] += 1
            self.free(sequence)
            sequence.host_table, sequence.num_cached_blocks = table, num_cached_blocks
        self.counters.swapped_out += len(moved)
        return [Copy(device, host) for device, host in moved.items()]

    def blocks_to_swap_in(self, sequences: Collection[Sequence]) -> int:
        """Return how many free blocks `swap_in` takes."""
        is_taken: dict[int, bool] = {}
        for sequence in sequences:
            for index, host in enumerate(sequence.host_table):
                if host not in is_taken:
                    block = self._known(sequence, index)
                    is_taken[host] = block is None or not self.ref_counts[block]
        return sum(is_taken.values())

    def swap_in(self, sequences: Collection[Sequence]) -> list[Copy]:
        """Bring the sequences back to the device. Returns the copies from host to device; blocks that the prefix cache
        still has are not copied."""
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
            # The step does these copies before anything reads the blocks, so the prefix cache may have them now.
            sequence.num_cached_blocks = 0
            self.cache_full_blocks(sequence, sequence.num_computed)
        self.counters.swapped_in += len(copies)
        return copies

    def _known(self, sequence: Sequence, index: int) -> int | None:
        """Return the cached block with the contents of entry `index` of the sequence, if there is one."""
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
            block = self.cached.pop()
            self._note_evicted(block)
            self._forget(block)
            self.counters.evictions += 1
        self.ref_counts[block] = 1
        return block

    def _note_evicted(self, block: int) -> None:
        """Called before the prefix cache forgets a block whose memory is needed."""

    def _touch(self, block: int) -> None:
        if not self.ref_counts[block]:
            self.cached.remove(block)
        self.ref_counts[block] += 1

    def _forget(self, block: int) -> None:
        """Remove the block from the prefix cache."""
        if (key := self._hash_of.pop(block, None)) is not None:
            del self._block_of[key]
            self.cached.forget(block)

    def _release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block]:
            return
        if block in self._hash_of:
            self.cached.add(block)
        else:
            self._free.append(block)

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise BlockError unless every block is accounted for.

        sequences: all sequences that hold blocks on the device or on the host.
        """
        sequences = list(sequences)
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        held.update(block for prefix in self.pinned for block in prefix.blocks)
        if any(held[block] != count for block, count in enumerate(self.ref_counts)):
            wrong = [(block, self.ref_counts[block], held[block]) for block in range(self.num_blocks)]
            raise BlockError(f"(block, counted, held) differ: {[entry for entry in wrong if entry[1] != entry[2]][:8]}")
        idle = sorted([*self._free, *self.cached])
        if idle != [block for block, count in enumerate(self.ref_counts) if not count]:
            raise BlockError(
                f"{len(self._free)} free and {len(self.cached)} cached blocks are not the blocks without owner"
            )
        if any(block not in self._hash_of for block in (*self.cached, *self.cached.pinned())):
            raise BlockError("a cached block has no hash")
        self.cached.check_integrity()
        if {block: key for key, block in self._block_of.items()} != self._hash_of:
            raise BlockError("the index of hashes is not one to one")
        on_host = Counter(block for sequence in sequences for block in sequence.host_table)
        if on_host != self._host_refs:
            raise BlockError("the owners of host blocks differ from their reference counts")
        if sorted([*self._free_host, *on_host]) != list(range(self.num_host_blocks)):
            raise BlockError("free and used host blocks do not add up to all host blocks")
