"""Where every group of sequences is, and how it moves: admitted, preempted, swapped in, forked, ended.

    add -> waiting -> running -> remove        a group waits again where it is recomputed later
              ^          |  ^
              +----------+  +---- swapped      its blocks lie in host memory meanwhile

The sequences of a request are one group: admitted, preempted and resumed together (paper section 4.5). When to move
whom is the scheduler's to decide.

Always: a group is in exactly one of `waiting`, `running`, `swapped`; each is in order; only running groups hold rows,
and blocks of the device.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from quire.worker.engine.blocks import BlockManager
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.sequence import PENDING, GroupState, Sequence, SequenceGroup
from quire.worker.engine.step import DecodeBatch, Step

# Classes of priority, 0 the highest (`quire.shared.keys.PRIORITY_CLASSES`).
NUM_PRIORITIES = 3

in_order = attrgetter("order")


@dataclass(slots=True)
class SchedulerCounters:
    """Groups that gave way since the start, by how they come back; and those of them that a higher class displaced."""

    recomputed: int = 0
    swapped: int = 0
    displaced: int = 0


class Groups:
    """All groups that are not finished, with the rows and blocks that they hold."""

    def __init__(self, limits: EngineLimits, blocks: BlockManager | None = None) -> None:
        self.limits = limits
        self.blocks = blocks or BlockManager(
            limits.num_blocks, limits.block_size, limits.num_host_blocks, limits.prefix_caching
        )
        self.rows = InputBatch(limits)
        self.waiting: list[deque[SequenceGroup]] = [deque() for _ in range(NUM_PRIORITIES)]
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self.counters = SchedulerCounters()
        # The running sequences, made anew only after one has come, gone, or begun to decode.
        self.decodes = DecodeBatch.of([])
        self._prefills: list[Sequence] = []
        self._is_stale = True

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that run, or whose row is kept."""
        return self.limits.max_num_seqs - self.rows.num_free

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first turn, or to be recomputed or swapped in."""
        return sum(group.num_rows for group in (*self.all_waiting(), *self.swapped))

    @property
    def num_preemptions(self) -> int:
        return self.counters.recomputed + self.counters.swapped

    def all_waiting(self) -> Iterator[SequenceGroup]:
        """In the order in which they are admitted."""
        for line in self.waiting:
            yield from line

    def all_groups(self) -> list[SequenceGroup]:
        return [*self.running, *self.swapped, *self.all_waiting()]

    def room(self) -> int:
        """How many more sequences fit now: rows that nobody runs in or waits for, but none while blocks are short."""
        blocks = self.blocks
        promised = sum(blocks.blocks_for(len(group.unfinished[0].token_ids)) for group in self.all_waiting())
        promised += sum(blocks.blocks_to_swap_in(group.unfinished) for group in self.swapped)
        if (blocks.num_free - promised) * 20 < self.limits.num_blocks:
            return 0
        return max(0, self.rows.num_free - self.num_waiting)

    def displaceable(self, priority: int) -> int:
        """Rows that a request of this class may take from lower ones, less those that wait for them already."""
        lower = sum(group.num_rows for group in self.running if group.priority > priority)
        waiting = sum(group.num_rows for group in self.all_waiting() if group.priority <= priority)
        return max(0, lower - waiting)

    def _refresh(self) -> None:
        """Bring the lists of running sequences up to date."""
        if not self._is_stale:
            return
        self._is_stale = False
        decodes: list[Sequence] = []
        self._prefills = []
        for group in self.running:
            for sequence in group.sequences:
                if sequence.row >= 0:
                    (decodes if sequence.is_decoding else self._prefills).append(sequence)
        self.decodes = DecodeBatch.of(decodes)

    # --- in and out ---------------------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Queue a group behind all others of its class."""
        group.state = GroupState.WAITING
        self.waiting[group.priority].append(group)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free what it holds. Forgetting twice does no harm."""
        if sequence.row >= 0:
            self.rows.release(sequence)
            self._is_stale = True
        self._cache_full_blocks(sequence)
        self.blocks.free(sequence)

    def _cache_full_blocks(self, sequence: Sequence) -> None:
        """Let others find what a sequence that gives its blocks up has computed, as far as its tokens are known.

        Prompts are findable as they are computed. What is drawn matters to others only afterwards, when a conversation
        goes on: so no step has to hash it.
        """
        if sequence.block_table and sequence.group.beams is None:
            known = len(sequence.token_ids) - sequence.token_ids[-2:].count(PENDING)
            self.blocks.cache_full_blocks(sequence, min(sequence.num_computed, known))

    def remove(self, group: SequenceGroup) -> None:
        """Forget a group and all its sequences."""
        for sequence in group.sequences:
            self.finish(sequence)
        self.rows.reserve(group, -group.num_reserved_rows)
        if group.state is GroupState.RUNNING:
            self.running.remove(group)
            self._is_stale = True
        elif group.state is GroupState.SWAPPED:
            self.swapped.remove(group)
        elif group.state is GroupState.WAITING:
            self.waiting[group.priority].remove(group)
        group.state = GroupState.OUT

    # --- running and giving way ---------------------------------------------------------------------------------------

    def _run(self, group: SequenceGroup, live: list[Sequence]) -> None:
        """Put a group among the running ones, with rows for those of its sequences that have blocks."""
        self.rows.reserve(group, group.num_rows)
        for sequence in live:
            self.rows.assign(sequence)
        group.state = GroupState.RUNNING
        insort(self.running, group, key=in_order)
        self._is_stale = True

    def _swap_in(self, step: Step, group: SequenceGroup) -> None:
        self.swapped.remove(group)
        live = [sequence for sequence in group.unfinished if sequence.host_table]
        step.swap_in += self.blocks.swap_in(live)
        self._run(group, live)
        for sequence in live:
            self.rows.shares_tail[sequence.row] = sequence.num_computed % self.limits.block_size != 0

    def _preempt(self, step: Step, group: SequenceGroup) -> None:
        """Take everything from a running group, all its sequences together."""
        live = [sequence for sequence in group.sequences if sequence.row >= 0]
        mode = self.limits.preemption
        swaps = mode == "swap" or (mode == "auto" and len(group.unfinished) > 1)
        for sequence in live:
            self.rows.release(sequence)
            self._cache_full_blocks(sequence)
        self.rows.reserve(group, -group.num_reserved_rows)
        self.running.remove(group)
        self._is_stale = True
        if swaps and self.blocks.can_swap_out(live):
            step.swap_out += self.blocks.swap_out(live)
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

    # --- one becomes several ------------------------------------------------------------------------------------------

    def begin_decoding(self, sequence: Sequence) -> None:
        """All known tokens of a sequence are computed: from now on it takes one in each step."""
        sequence.is_decoding = True
        self._is_stale = True

    def fork(self, group: SequenceGroup) -> None:
        """The leader has computed the prompt: let all other sequences of the group begin behind it."""
        leader, *others = group.unfinished
        count = leader.num_prompt_tokens
        is_partial = count % self.limits.block_size != 0
        for child in others:
            self.blocks.fork(leader, child, count)
            self.rows.assign(child)
        for sequence in (leader, *others):
            self.rows.shares_tail[sequence.row] = is_partial
        group.is_forked = True
        self._is_stale = True

    def branch(self, group: SequenceGroup, parents: list[int]) -> None:
        """Make beam i of the group a child of its former beam `parents[i]`; drop those that have none.

        All beams have computed all their tokens. A first child is its parent carried on; further ones fork from it.
        """
        beams = group.sequences
        for index in set(range(len(beams))).difference(parents):
            self.rows.release(beams[index], keep=True)
            self.blocks.free(beams[index])
        group.sequences = []
        for choice, index in enumerate(parents):
            parent = child = beams[index]
            if index in parents[:choice]:
                child, count = parent.copy(choice), len(parent.token_ids)
                self.blocks.fork(parent, child, count)
                self.rows.assign(child)
                child.is_decoding = True
                for sequence in (parent, child):
                    self.rows.shares_tail[sequence.row] = count % self.limits.block_size != 0
            child.choice = choice
            group.sequences.append(child)
        group.is_forked = True
        self._is_stale = True
