"""All unfinished groups of sequences, and how a group moves: admitted, preempted, swapped in, forked, finished.

    add -> waiting -> running -> remove        a group preempted by recomputation waits again
              ^          |  ^
              +----------+  +---- swapped      a group preempted by swapping has its blocks in host memory

The sequences of a request are one group: they are admitted, preempted and resumed together (paper section 4.5). The
scheduler decides which group moves when.

Invariants: a group is in exactly one of `waiting`, `running` and `swapped`; each of these is in order; only running
groups hold rows of the input batch and blocks of the device.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from quire.shared.protocol.keys import DEFAULT_CLASS, PRIORITY_CLASSES
from quire.worker.engine.blocks import BlockManager
from quire.worker.engine.features.states.blocks import StatefulBlockManager
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.sequence import PENDING, GroupState, Sequence, SequenceGroup
from quire.worker.engine.step import DecodeBatch, Step

# A priority is an index into PRIORITY_CLASSES: 0 is the highest class.
NUM_PRIORITIES = len(PRIORITY_CLASSES)
DEFAULT_PRIORITY = PRIORITY_CLASSES.index(DEFAULT_CLASS)

# No row counts as free for a new request while fewer than one in this many blocks is free.
LEAST_FREE_BLOCKS = 20

in_order = attrgetter("order")


@dataclass(slots=True)
class SchedulerCounters:
    """Groups preempted since the start of the process, by mode; and those preempted for a higher class, in any mode."""

    recomputed: int = 0
    swapped: int = 0
    for_higher_class: int = 0


class Groups:
    """All unfinished groups, with their rows and blocks."""

    def __init__(self, limits: EngineLimits, blocks: BlockManager | None = None) -> None:
        self.limits = limits
        sizes = limits.num_blocks, limits.block_size, limits.num_host_blocks, limits.prefix_caching
        # The blocks, with slots of recurrent states, of a model that has such states.
        self.state_blocks = StatefulBlockManager.of(limits) if limits.num_state_slots else None
        self.states = self.state_blocks.states if self.state_blocks is not None else None
        self.blocks = self.state_blocks or blocks or BlockManager(*sizes)
        self.blocks.cached.max_pins = limits.max_pinned_blocks
        self.blocks.cached.max_owner_pins = limits.max_owner_pinned_blocks
        self.input_batch = InputBatch(limits)
        self.waiting: list[deque[SequenceGroup]] = [deque() for _ in range(NUM_PRIORITIES)]
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self.counters = SchedulerCounters()
        # Running sequences: those that decode, and those that compute chunks. `refresh` builds both anew, but only
        # after a sequence has joined, left or begun to decode.
        self.decodes = DecodeBatch.of([])
        self.prefills: list[Sequence] = []
        self._is_stale = False

    # --- sizes --------------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that run or have a reserved row."""
        return self.limits.max_num_seqs - self.input_batch.num_free

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be admitted, recomputed or swapped in."""
        return sum(group.num_rows for group in (*self.all_waiting(), *self.swapped))

    @property
    def num_preemptions(self) -> int:
        return self.counters.recomputed + self.counters.swapped

    def all_waiting(self) -> Iterator[SequenceGroup]:
        """Iterate over the waiting groups in the order of their admission."""
        for queue in self.waiting:
            yield from queue

    def all_groups(self) -> list[SequenceGroup]:
        return [*self.running, *self.swapped, *self.all_waiting()]

    def num_free_rows(self) -> int:
        """Return how many sequences can be added now and run at once; 0 while blocks are short.

        Rows and blocks that waiting and swapped groups will take do not count as free.
        """
        blocks = self.blocks
        reserved = sum(blocks.blocks_for(len(group.unfinished[0].token_ids)) for group in self.all_waiting())
        reserved += sum(blocks.blocks_to_swap_in(group.unfinished) for group in self.swapped)
        if (blocks.num_free - reserved) * LEAST_FREE_BLOCKS < self.limits.num_blocks:
            return 0
        return max(0, self.input_batch.num_free - self.num_waiting)

    def num_preemptible_rows(self, priority: int) -> int:
        """Return how many rows a new request of this class may take from lower classes.

        Rows that waiting groups of this class or a higher one may take do not count.
        """
        lower = sum(group.num_rows for group in self.running if group.priority > priority)
        waiting = sum(group.num_rows for group in self.all_waiting() if group.priority <= priority)
        return max(0, lower - waiting)

    def refresh(self) -> None:
        """Bring `decodes` and `prefills` up to date."""
        if not self._is_stale:
            return
        self._is_stale = False
        decodes: list[Sequence] = []
        self.prefills = []
        for group in self.running:
            for sequence in group.sequences:
                if sequence.row >= 0:
                    (decodes if sequence.is_decoding else self.prefills).append(sequence)
        self.decodes = DecodeBatch.of(decodes)

    def changed(self) -> None:
        """Have the next `refresh` build `decodes` and `prefills` anew."""
        self._is_stale = True

    # --- add and remove -----------------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Append a group to the waiting queue of its class."""
        group.state = GroupState.WAITING
        self.waiting[group.priority].append(group)

    def finish(self, sequence: Sequence) -> None:
        """Free the row and the blocks of a sequence in any state. A second call does nothing."""
        if sequence.row >= 0:
            self.input_batch.release(sequence)
            self._is_stale = True
        self.cache_full_blocks(sequence)
        self.blocks.free(sequence)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group and free what its sequences hold."""
        for sequence in group.sequences:
            self.finish(sequence)
        self.input_batch.reserve(group, -group.num_reserved_rows)
        if group.state is GroupState.RUNNING:
            self.running.remove(group)
            self._is_stale = True
        elif group.state is GroupState.SWAPPED:
            self.swapped.remove(group)
        elif group.state is GroupState.WAITING:
            self.waiting[group.priority].remove(group)
        group.state = GroupState.OUT

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Add the computed blocks of a sequence to the prefix cache, up to the known tokens.

        Blocks of prompts are cached as they are computed. Blocks of output are cached only when the sequence is about
        to free them, or when another request forks from it: then others need them, and no decode step has to hash a
        block.
        """
        if sequence.block_table and sequence.group.beams is None:
            known = len(sequence.token_ids) - sequence.token_ids[-2:].count(PENDING)
            self.blocks.cache_full_blocks(sequence, min(sequence.num_computed, known))

    # --- run, swap in, preempt ----------------------------------------------------------------------------------------

    def run(self, group: SequenceGroup, live: list[Sequence]) -> None:
        """Move a group to `running`.

        live: the group's sequences that have blocks. Each gets a row of the input batch; rows are reserved for the rest
        of the group.
        """
        self.input_batch.reserve(group, group.num_rows)
        for sequence in live:
            self.input_batch.assign(sequence)
        group.state = GroupState.RUNNING
        insort(self.running, group, key=in_order)
        self._is_stale = True

    def swap_in(self, step: Step, group: SequenceGroup) -> None:
        """Bring a swapped group back to the device; the copies are part of the step."""
        self.swapped.remove(group)
        live = [sequence for sequence in group.unfinished if sequence.host_table]
        step.swap_in += self.blocks.swap_in(live)
        self.run(group, live)
        for sequence in live:
            self.input_batch.shares_tail[sequence.row] = sequence.num_computed % self.limits.block_size != 0
            if self.states is not None:
                self.states.unpark(sequence)

    def preempt(self, step: Step, group: SequenceGroup) -> None:
        """Take rows and blocks from a running group, for all its sequences together.

        The group is swapped out if the preemption mode says so and host memory suffices; else it is recomputed later.
        """
        live = [sequence for sequence in group.sequences if sequence.row >= 0]
        mode = self.limits.preemption
        swaps = mode == "swap" or (mode == "auto" and len(group.unfinished) > 1)
        rows = [sequence.row for sequence in live]
        for sequence in live:
            self.input_batch.release(sequence)
            self.cache_full_blocks(sequence)
        self.input_batch.reserve(group, -group.num_reserved_rows)
        self.running.remove(group)
        self._is_stale = True
        states = self.states
        if swaps and self.blocks.can_swap_out(live) and (states is None or states.can_take(len(live))):
            step.swap_out += self.blocks.swap_out(live)
            if states is not None:
                states.park(live, rows)
            group.state = GroupState.SWAPPED
            insort(self.swapped, group, key=in_order)
            self.counters.swapped += 1
            return
        for sequence in live:
            self.blocks.free(sequence)
            sequence.num_computed = sequence.num_stored = 0
            sequence.is_decoding = False
        group.is_forked = False
        group.state = GroupState.WAITING
        self.waiting[group.priority].appendleft(group)
        self.counters.recomputed += 1

    # --- decode and fork ----------------------------------------------------------------------------------------------

    def begin_decoding(self, sequence: Sequence) -> None:
        """Let a sequence whose known tokens are all computed decode one token in each step."""
        sequence.is_decoding = True
        self._is_stale = True

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Add blocks to a running sequence for tokens after those that it knows. The caller has checked that they are
        free."""
        for _ in range(self.blocks.blocks_for(len(sequence.token_ids) + num_tokens) - len(sequence.block_table)):
            self.blocks.append(sequence)
            self.input_batch.add_block(sequence)

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks of a running sequence that have no known token, and that `extend` has added."""
        count = self.blocks.blocks_for(len(sequence.token_ids))
        if len(sequence.block_table) > count:
            self.blocks.trim(sequence, count)
            self.input_batch.capacities[sequence.row] = count * self.limits.block_size

    def fork(self, group: SequenceGroup) -> None:
        """Fork all other sequences of the group from the leader after the leader has computed the prompt."""
        leader, *others = group.unfinished
        count = leader.num_prompt_tokens
        is_partial = count % self.limits.block_size != 0
        for child in others:
            self.blocks.fork(leader, child, count)
            self.input_batch.assign(child)
            self._copy_state(leader, child)
        for sequence in (leader, *others):
            self.input_batch.shares_tail[sequence.row] = is_partial
        group.is_forked = True
        self._is_stale = True

    def _copy_state(self, parent: Sequence, child: Sequence) -> None:
        if self.states is not None:
            self.states.copy(parent.row, child.row)

    def branch(self, group: SequenceGroup, parents: list[int]) -> None:
        """Replace the beams of a group: new beam i continues beam `parents[i]`. Beams without a child are freed.

        All beams have computed all their tokens. The first child of a beam is the beam itself; further ones fork from
        it.
        """
        beams = group.sequences
        for index in set(range(len(beams))).difference(parents):
            self.input_batch.release(beams[index], keep=True)
            self.blocks.free(beams[index])
        group.sequences = []
        for choice, index in enumerate(parents):
            parent = child = beams[index]
            if index in parents[:choice]:
                child, count = parent.copy(choice), len(parent.token_ids)
                self.blocks.fork(parent, child, count)
                self.input_batch.assign(child)
                self._copy_state(parent, child)
                child.is_decoding = True
                for sequence in (parent, child):
                    self.input_batch.shares_tail[sequence.row] = count % self.limits.block_size != 0
            child.choice = choice
            group.sequences.append(child)
        group.is_forked = True
        self._is_stale = True
