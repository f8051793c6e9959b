"""The block manager alone: whatever is forked, appended, copied, cached, pinned, evicted and swapped, every sequence
reads exactly its own tokens through its block table.

A plain model keeps the contents of each slot, as (root, all tokens up to this one), and moves them as the copies say.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.blocks import BlockCounters, BlockManager, Copy, PinnedPrefix, cache_root, cache_scope
from quire.worker.engine.sequence import Sequence, SequenceGroup

TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=14).map(tuple)
WHICH = st.integers(0, 100)
Slot = tuple[bytes, tuple[int, ...]] | None


class Blocks(RuleBasedStateMachine):
    """Sequences that have computed all their tokens, with at most one partly filled block, or that are swapped out."""

    @initialize(
        num_blocks=st.integers(6, 16),
        size=st.integers(1, 4),
        num_host_blocks=st.integers(0, 10),
        prefix_caching=st.sampled_from([True, True, False]),
    )
    def start(self, num_blocks: int, size: int, num_host_blocks: int, prefix_caching: bool) -> None:
        self.size = size
        self.blocks = BlockManager(num_blocks, size, num_host_blocks, prefix_caching)
        self.device: list[list[Slot]] = [[None] * size for _ in range(num_blocks)]
        self.host: list[list[Slot]] = [[None] * size for _ in range(num_host_blocks)]
        self.running: list[Sequence] = []
        self.swapped: list[list[Sequence]] = []
        self.pinned: list[tuple[PinnedPrefix, list[Slot]]] = []
        # Cached blocks without owner, in the order in which they were freed.
        self.idle: list[int] = []
        self.counted = BlockCounters()

    # --- the model of memory --------------------------------------------------------------------------------------

    def write(self, sequence: Sequence, first: int, end: int) -> None:
        for at in range(first, end):
            block = sequence.block_table[at // self.size]
            assert self.blocks.ref_counts[block] == 1, "a write into a block of others"
            self.device[block][at % self.size] = self.content(sequence, at)

    def content(self, sequence: Sequence, at: int) -> Slot:
        return sequence.group.cache_root, tuple(sequence.token_ids[: at + 1])

    def num_unused(self) -> int:
        return self.blocks.num_free - self.blocks.num_cached

    def note_allocated(self, count: int, num_unused: int) -> None:
        """Note an allocation of `count` blocks: those without contents go first."""
        self.counted.evictions += max(0, count - num_unused)

    def copy(self, copy: Copy | None) -> None:
        if copy is not None:
            self.counted.copies += 1
            self.device[copy.target] = self.device[copy.source].copy()

    def cached(self) -> list[int]:
        """Return the cached blocks without owner, in the order of eviction."""
        return list(self.blocks.cached)

    def hashed(self) -> set[int]:
        """Return the blocks that a prefix is found by."""
        return set(self.blocks._hash_of)

    def note_idle(self) -> None:
        """Track the cached blocks without owner; an evicted block must have been one for the longest time."""
        now = self.cached()
        kept = [block for block in self.idle if block in now]
        assert now[: len(kept)] == kept, "the order of eviction is not that of use"
        self.idle = now

    def evicted(self, before: list[int]) -> list[int]:
        hashed = self.hashed()
        return [block for block in before if block not in hashed]

    # --- rules ----------------------------------------------------------------------------------------------------

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "", "x"]))
    def start_sequence(self, tokens: tuple[int, ...], salt: str) -> None:
        group = SequenceGroup("r", tokens, SamplingParams(1), cache_root=cache_root("m", salt=salt))
        sequence = Sequence(group, 0, tokens)
        prefix = self.blocks.find_prefix(sequence, len(tokens))
        for at in range(prefix.num_tokens):
            block = prefix.blocks[at // self.size]
            assert self.device[block][at % self.size] == self.content(sequence, at), "a hit of other tokens"
        free, needed = self.blocks.num_free, self.blocks.blocks_to_start(prefix, len(tokens))
        if not self.blocks.can_start(prefix, len(tokens), 0):
            return
        idle, num_unused = self.cached(), self.num_unused()
        self.blocks.start(sequence, prefix, len(tokens))
        taken_from_cache = [block for block in idle if block in prefix.blocks]
        gone = self.evicted(idle)
        rest = [block for block in idle if block not in taken_from_cache]
        assert gone == rest[: len(gone)], "the least recently used are evicted first"
        if prefix.num_tokens % self.size and len(tokens) > prefix.num_tokens:
            self.copy(self.blocks.make_writable(sequence, prefix.num_tokens // self.size))
        assert free - self.blocks.num_free == needed
        self.note_allocated(needed - len(taken_from_cache), num_unused)
        self.write(sequence, prefix.num_tokens, len(tokens))
        sequence.num_computed = sequence.num_stored = len(tokens)
        self.blocks.cache_full_blocks(sequence, sequence.num_computed)
        self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(which=WHICH, token=st.integers(1, 2))
    def append_token(self, which: int, token: int) -> None:
        sequence = self.running[which % len(self.running)]
        at = len(sequence.token_ids)
        is_new = at % self.size == 0
        if not self.blocks.num_free and (is_new or self.blocks.ref_counts[sequence.block_table[-1]] > 1):
            return
        num_unused = self.num_unused()
        if is_new:
            self.blocks.append(sequence)
            self.note_allocated(1, num_unused)
        else:
            shared = self.blocks.ref_counts[sequence.block_table[-1]] > 1
            copy = self.blocks.make_writable(sequence, at // self.size)
            assert (copy is not None) == shared, "the last owner writes in place, any other copies"
            self.note_allocated(int(shared), num_unused)
            self.copy(copy)
        sequence.token_ids.append(token)
        self.write(sequence, at, at + 1)
        sequence.num_computed = sequence.num_stored = at + 1
        self.blocks.cache_full_blocks(sequence, sequence.num_computed)

    @precondition(lambda self: self.running)
    @rule(which=WHICH, cut=st.integers(0, 5))
    def fork(self, which: int, cut: int) -> None:
        parent = self.running[which % len(self.running)]
        child = parent.copy(1)
        count = max(1, len(parent.token_ids) - cut)
        del child.token_ids[count:]
        del child.block_hashes[count // self.size :]
        free = self.blocks.num_free
        self.blocks.fork(parent, child, count)
        assert self.blocks.num_free == free, "a fork takes no block"
        self.counted.forks += 1
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def free(self, which: int) -> None:
        sequence = self.running.pop(which % len(self.running))
        table, idle = [*sequence.block_table], self.cached()
        self.blocks.free(sequence)
        fresh = [block for block in self.cached() if block not in idle]
        assert fresh == [block for block in reversed(table) if block in fresh], "ends go before beginnings"

    @precondition(lambda self: self.running and len(self.blocks.pinned) < 2)
    @rule(which=WHICH)
    def pin(self, which: int) -> None:
        sequence = self.running[which % len(self.running)]
        if len(sequence.block_table) > 3:
            return
        prefix = self.blocks.pin(f"p{which}", sequence)
        self.pinned.append((prefix, [self.content(sequence, at) for at in range(prefix.num_tokens)]))

    @precondition(lambda self: self.running)
    @rule(which=WHICH, count=st.integers(1, 3))
    def swap_out(self, which: int, count: int) -> None:
        at = which % len(self.running)
        group = self.running[at : at + count]
        if not self.blocks.can_swap_out(group):
            return
        distinct = {block for sequence in group for block in sequence.block_table}
        copies = self.blocks.swap_out(group)
        assert sorted(copy.source for copy in copies) == sorted(distinct), "a shared block moves once"
        self.counted.swapped_out += len(copies)
        for copy in copies:
            self.host[copy.target] = self.device[copy.source].copy()
        del self.running[at : at + count]
        self.swapped.append(group)

    @precondition(lambda self: self.swapped)
    @rule(which=WHICH)
    def swap_in(self, which: int) -> None:
        group = self.swapped[which % len(self.swapped)]
        needed, free, num_unused = self.blocks.blocks_to_swap_in(group), self.blocks.num_free, self.num_unused()
        if needed > free:
            return
        hosts = {host for sequence in group for host in sequence.host_table}
        copies = self.blocks.swap_in(group)
        # Blocks of the group with the same tokens may become one.
        spare = len(hosts) - len({tuple(self.host[host]) for host in hosts})
        assert needed - spare <= free - self.blocks.num_free <= needed
        self.counted.swapped_in += len(copies)
        self.note_allocated(len(copies), num_unused)
        for copy in copies:
            self.device[copy.target] = self.host[copy.source].copy()
        self.swapped.remove(group)
        self.running += group

    @precondition(lambda self: self.swapped)
    @rule(which=WHICH)
    def cancel_swapped(self, which: int) -> None:
        for sequence in self.swapped.pop(which % len(self.swapped)):
            self.blocks.free(sequence)

    # --- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def all_is_accounted_for(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity([*self.running, *(one for group in self.swapped for one in group)])
        self.note_idle()
        assert self.blocks.counters == self.counted

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for tables, memory in self.tables() if hasattr(self, "blocks") else ():
            for sequence, table in tables:
                waste = len(table) * self.size - len(sequence.token_ids)
                assert 0 <= waste < self.size, "a block is wasted"
                full = len(sequence.token_ids) // self.size
                assert len(sequence.block_hashes) <= full, "a hash of a block that is not full"
                for at in range(len(sequence.token_ids)):
                    assert memory[table[at // self.size]][at % self.size] == self.content(sequence, at)

    def tables(self) -> list[tuple[list[tuple[Sequence, list[int]]], Any]]:
        return [
            ([(one, one.block_table) for one in self.running], self.device),
            ([(one, one.host_table) for group in self.swapped for one in group], self.host),
        ]

    @invariant()
    def what_the_cache_knows_has_one_content_and_pinned_blocks_stay(self) -> None:
        if not hasattr(self, "blocks"):
            return
        contents = [tuple(self.device[block]) for block in self.hashed()]
        assert len(set(contents)) == len(contents), "two hashes for the same tokens"
        for prefix, expected in self.pinned:
            for at, content in enumerate(expected):
                assert self.device[prefix.blocks[at // self.size]][at % self.size] == content
            assert all(self.blocks.ref_counts[block] for block in prefix.blocks)

    def teardown(self) -> None:
        if not hasattr(self, "blocks"):
            return
        for sequence in (*self.running, *(one for group in self.swapped for one in group)):
            self.blocks.free(sequence)
        self.blocks.check_integrity([])
        assert self.blocks.num_free + self.blocks.num_pinned == self.blocks.num_blocks
        assert self.blocks.num_free_host == self.blocks.num_host_blocks


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


def sequence_of(tokens: tuple[int, ...], scope: str) -> Sequence:
    group = SequenceGroup("r", tokens, SamplingParams(1), cache_root=cache_root("m"), cache_scope=cache_scope(scope))
    return Sequence(group, 0, tokens)


def computed(blocks: BlockManager, tokens: tuple[int, ...], scope: str) -> tuple[Sequence, int]:
    """Return a sequence whose tokens are all computed, and the number of those that were cached."""
    sequence = sequence_of(tokens, scope)
    prefix = blocks.find_prefix(sequence, len(tokens))
    blocks.start(sequence, prefix, len(tokens))
    if prefix.num_tokens % 2:
        blocks.make_writable(sequence, prefix.num_tokens // 2)
    sequence.num_computed = len(tokens)
    blocks.cache_full_blocks(sequence, len(tokens))
    return sequence, prefix.num_tokens


def test_scopes_share_pinned_blocks_and_nothing_else() -> None:
    blocks = BlockManager(100, 2)
    pinned = (1, 2, 3, 4, 5)  # two blocks, and half of a third one
    sequence, _ = computed(blocks, pinned, "")
    blocks.pin("p", sequence)
    blocks.free(sequence)
    for tokens, common in (((*pinned, 6, 7, 8), 5), ((1, 2, 9, 9, 8, 8), 2), ((7, 7, 8, 8), 0)):
        for scope in ("", "a", "b"):
            first, cached = computed(blocks, tokens, scope)
            assert cached == common, "another scope computed the same tokens"
            second, cached = computed(blocks, tokens, scope)
            assert cached == len(tokens) // 2 * 2
            blocks.free(first)
            blocks.free(second)
    blocks.check_integrity([])


def test_a_swapped_sequence_takes_no_block_that_another_one_holds_and_copies_none_that_is_cached() -> None:
    blocks = BlockManager(20, 2, 10)
    swapped, _ = computed(blocks, (1, 2, 3, 4, 5), "")
    other, cached = computed(blocks, (1, 2, 3, 4, 6), "")
    assert cached == 4
    for taken in (1, 3):  # the partly filled block; and those that only the cache has
        assert len(blocks.swap_out([swapped])) == 3
        free = blocks.num_free
        assert blocks.blocks_to_swap_in([swapped]) == taken
        assert len(blocks.swap_in([swapped])) == 1
        assert free - blocks.num_free == taken
        blocks.free(other)
    blocks.check_integrity([swapped])
