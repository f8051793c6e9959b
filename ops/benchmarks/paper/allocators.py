"""The memory management of the paper's baselines (section 6.1), with the interface of the paged block manager.

Orca keeps the cache of a request in one contiguous region. A buddy allocator reserves it when the request is admitted.
The policy decides the size: Oracle knows the length of the output, Pow2 rounds it up to a power of two, Max reserves
the whole context. No memory is shared: every sequence of a group has its own region. A running request has all the
memory that it will need, so no request is preempted. (A fork of a sequence would have to copy its cache. Here the copy
takes no time, which favours the baselines.)

The allocators here count in tokens: their engine has blocks of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.worker.engine.blocks import BlockError, BlockManager, CachedPrefix
from quire.worker.engine.sequence import Sequence, SequenceGroup


def next_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


class BuddyAllocator:
    """Regions whose sizes are powers of two, each at a multiple of its size (Knowlton, CACM 1965).

    A pool of any other size is divided from the left into the largest regions that fit.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_free = size
        self._free: dict[int, set[int]] = {}  # by size: addresses
        self._taken: dict[int, int] = {}  # by address: size
        self._roots: dict[int, int] = {}  # regions that have no buddy
        address = 0
        for bit in reversed(range(size.bit_length())):
            if size & (1 << bit):
                self._roots[address] = 1 << bit
                self._free.setdefault(1 << bit, set()).add(address)
                address += 1 << bit

    def fits(self, sizes: Iterable[int]) -> bool:
        """Return whether regions of all these sizes can be allocated together, largest first."""
        taken = []
        for size in sorted(sizes, reverse=True):
            address = self.take(size)
            if address is None:
                break
            taken.append(address)
        else:
            for address in taken:
                self.give_back(address)
            return True
        for address in taken:
            self.give_back(address)
        return False

    def take(self, size: int) -> int | None:
        """Allocate at least `size` from the smallest free region that fits. Return its address, or None."""
        wanted = next_power_of_two(size)
        free_size = min((there for there, addresses in self._free.items() if there >= wanted and addresses), default=0)
        if not free_size:
            return None
        address = min(self._free[free_size])
        self._free[free_size].remove(address)
        while free_size > wanted:
            free_size //= 2
            self._free.setdefault(free_size, set()).add(address + free_size)
        self._taken[address] = wanted
        self.num_free -= wanted
        return address

    def give_back(self, address: int) -> None:
        """Free a region, and merge it with its buddy while the buddy is free too."""
        size = self._taken.pop(address)
        self.num_free += size
        while self._roots.get(address) != size:
            buddy = address ^ size
            if buddy not in self._free.get(size, ()):
                break
            self._free[size].remove(buddy)
            address = min(address, buddy)
            size *= 2
        self._free.setdefault(size, set()).add(address)

    def regions(self) -> dict[int, int]:
        """Return the allocated regions: address, size."""
        return dict(self._taken)

    def free_regions(self) -> list[tuple[int, int]]:
        """Return the free regions in order: address, size."""
        return sorted((address, size) for size, addresses in self._free.items() for address in addresses)


@dataclass(frozen=True, slots=True)
class Region:
    """The region of a sequence: `reserved` tokens from `address` on."""

    address: int
    reserved: int


class _Candidate(CachedPrefix):
    """An empty prefix with its group. The scheduler passes the result of `find_prefix` to `can_start`."""

    sequence: Sequence


Policy = Callable[[int, int, int], int]

# Tokens reserved for (prompt, true output, context).
POLICIES: dict[str, Policy] = {
    "Orca (Max)": lambda prompt, output, context: context,
    "Orca (Pow2)": lambda prompt, output, context: min(context, prompt + next_power_of_two(output)),
    "Orca (Oracle)": lambda prompt, output, context: prompt + output,
}


class OrcaManager(BlockManager):
    """Contiguous reservation at admission. The true output length is the request's max_tokens."""

    def __init__(self, num_slots: int, context: int, policy: Policy) -> None:
        super().__init__(num_slots, block_size=1, prefix_caching=False)
        self.context = context
        self.policy = policy
        self.buddy = BuddyAllocator(num_slots)
        self.regions: dict[Sequence, Region] = {}
        # Regions of a group that no sequence uses at the moment: before a fork, and between beams.
        self._spare: dict[SequenceGroup, list[Region]] = {}

    def reserved_for(self, group: SequenceGroup) -> int:
        """Return the number of tokens that each sequence of the group reserves."""
        return self.policy(len(group.prompt), group.sampling.max_tokens, self.context)

    @property
    def num_free(self) -> int:
        return self.buddy.num_free

    def find_prefix(self, sequence: Sequence, num_tokens: int) -> CachedPrefix:
        candidate = _Candidate([], 0)
        candidate.sequence = sequence
        return candidate

    def can_start(self, prefix: CachedPrefix, num_tokens: int, reserve: int) -> bool:
        assert isinstance(prefix, _Candidate)
        group = prefix.sequence.group
        return self.buddy.fits([self.reserved_for(group)] * group.num_rows)

    def start(self, sequence: Sequence, prefix: CachedPrefix, num_tokens: int) -> None:
        group = sequence.group
        reserved = self.reserved_for(group)
        spare = self._spare[group] = []
        for _ in range(group.num_rows):
            address = self.buddy.take(reserved)
            assert address is not None, "the scheduler asked can_start first"
            spare.append(Region(address, reserved))
        self._occupy(sequence)
        sequence.num_stored = sequence.num_cached_blocks = 0

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        self._occupy(child)
        child.num_computed = child.num_stored = num_tokens
        self.counters.forks += 1

    def append(self, sequence: Sequence) -> None:
        raise BlockError("a sequence grows out of its reservation")

    def free(self, sequence: Sequence) -> None:
        """Keep the region for the group until the group has ended."""
        group = sequence.group
        sequence.block_table = []
        regions = [self.regions.pop(sequence)] if sequence in self.regions else []
        if not group.is_finished:
            self._spare[group] += regions
            return
        for region in (*regions, *self._spare.pop(group, ())):
            self.buddy.give_back(region.address)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        held = [*self.regions.values(), *(region for spare in self._spare.values() for region in spare)]
        if {region.address for region in held} != set(self.buddy.regions()):
            raise BlockError("the regions of sequences are not those taken from the buddy allocator")
        if any(bool(sequence.block_table) != (sequence in self.regions) for sequence in sequences):
            raise BlockError("a block table without a region, or a region without a table")

    def _occupy(self, sequence: Sequence) -> None:
        region = self.regions[sequence] = self._spare[sequence.group].pop()
        sequence.block_table = list(range(region.address, region.address + region.reserved))
