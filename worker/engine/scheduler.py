"""Who runs in a step, with how many tokens each, and who has to give way.

Iteration-level scheduling under one token budget: every decoding sequence first, so that a long prompt never stalls
running streams, then chunks of prompts. First come, first served within a priority class.

When blocks run out the newest group of the lowest class gives way: it is recomputed later, or swapped to host memory.
So the oldest always advances, and nothing starves. Swapped groups come back before new ones are admitted; a new one may
pass them if that does not delay them.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from quire.worker.engine.blocks import BlockManager, CachedPrefix
from quire.worker.engine.groups import NUM_PRIORITIES, Groups, in_order
from quire.worker.engine.limits import EngineLimits, RequestRefused
from quire.worker.engine.sequence import PENDING, GroupState, Sequence, SequenceGroup
from quire.worker.engine.step import PrefillChunk, Step

# Share of the blocks that admission leaves free, so that a new sequence is not preempted a few tokens later.
WATERMARK = 0.01


class Scheduler(Groups):
    """Decides; computes nothing."""

    def __init__(self, limits: EngineLimits, blocks: BlockManager | None = None) -> None:
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({limits.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({limits.max_num_seqs}): every running sequence decodes one token in each step"
            )
        super().__init__(limits, blocks)
        # Tokens of a step; fewer than the limit once device memory has run out.
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        # Prompt tokens of a step in which others decode; the engine may change it from step to step.
        self.max_prefill_tokens = limits.max_prefill_tokens or limits.max_num_batched_tokens
        self._reserve = max(1, int(WATERMARK * limits.num_blocks))

    # --- who can run at all -------------------------------------------------------------------------------------------

    def check_fits(self, group: SequenceGroup) -> None:
        """Raise RequestRefused if the group could never run to its end."""
        tokens, count = len(group.prompt) + group.sampling.max_tokens, group.sampling.num_sequences
        if tokens > self.limits.max_model_len:
            raise RequestRefused(
                f"{len(group.prompt)} prompt tokens and max_tokens {group.sampling.max_tokens} exceed the context of "
                f"{self.limits.max_model_len} tokens"
            )
        if count > self.limits.max_num_seqs:
            raise RequestRefused(
                f"{count} sequences at once are more than the {self.limits.max_num_seqs} that run here (max_num_seqs)"
            )
        needed, there = self._blocks_at_most(group), self.limits.num_blocks - self.blocks.num_pinned
        if needed > there:
            there += self._pinned_part(group)
        if needed > there:
            raise RequestRefused(
                f"{tokens} tokens{f' in {count} sequences' if count > 1 else ''} need {needed} KV blocks and the cache "
                f"has {there}"
            )

    def _blocks_at_most(self, group: SequenceGroup) -> int:
        """Blocks of the group when all its sequences are at their longest and share nothing but the prompt."""
        tokens = len(group.prompt) + group.sampling.max_tokens
        shared = len(group.prompt) // self.blocks.block_size
        return shared + group.sampling.num_sequences * (self.blocks.blocks_for(tokens) - shared)

    def _pinned_part(self, group: SequenceGroup) -> int:
        """Full blocks of the group's prompt that are pinned."""
        pinned = {block for prefix in self.blocks.pinned for block in prefix.blocks}
        found = self.blocks.find_prefix(Sequence(group, 0, group.prompt), len(group.prompt))
        return sum(1 for block in found.blocks[: found.num_tokens // self.blocks.block_size] if block in pinned)

    # --- the next step ------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """The next step. Without tokens only if there is nothing to do."""
        step = Step(self.decodes)
        self._displace(step)
        preemptions = self.num_preemptions
        self._make_room(step)
        self._refresh()
        step.decodes = self.decodes
        budget = self.max_num_batched_tokens - len(self.decodes)
        if self.decodes:
            budget = min(budget, self.max_prefill_tokens)
        prefills = self._prefills
        # Who was just preempted must not push out others by coming straight back.
        admits = self.num_preemptions == preemptions
        for priority in range(NUM_PRIORITIES):
            for sequence in prefills:
                if sequence.group.priority == priority:
                    budget -= self._add_chunk(step, sequence, budget)
            if admits:
                budget, admits = self._admit(step, priority, budget)
        return step

    def _add_chunk(self, step: Step, sequence: Sequence, budget: int) -> int:
        left = self._goal(sequence) - sequence.num_computed
        count = min(left, budget)
        if count:
            # The last chunk of a leader lets the others fork, also those of beams that draw later.
            draws = sequence.group.needs_fork or not _is_resumed_beam(sequence)
            step.chunks.append(PrefillChunk(sequence, count, is_sampled=count == left and draws))
        return count

    @staticmethod
    def _goal(sequence: Sequence) -> int:
        """Tokens up to which a sequence computes in chunks.

        A leader stops where the others fork. A beam stops before its last token: beams draw in one step, all together.
        """
        if sequence.group.needs_fork:
            return sequence.num_prompt_tokens
        return len(sequence.token_ids) - _is_resumed_beam(sequence)

    # --- running groups take blocks -----------------------------------------------------------------------------------

    def _make_room(self, step: Step) -> None:
        """Give every running sequence the blocks for the tokens it knows; preempt the newest until they suffice."""
        self._refresh()
        rows, at = self.rows, self.decodes.rows
        is_full = rows.lengths[at] > rows.capacities[at]
        shares = rows.shares_tail[at]
        hungry = [self.decodes.sequences[i] for i in np.flatnonzero(is_full | shares)]
        resumed = [
            sequence
            for sequence in self._prefills
            if rows.lengths[sequence.row] > rows.capacities[sequence.row] or rows.shares_tail[sequence.row]
        ]
        if not hungry and not resumed:
            return
        if not resumed and len(hungry) <= self.blocks.num_free and not shares.any():
            # The ordinary case: each of them has filled its last block and gets one more.
            rows.add_blocks(at[is_full], self.blocks.append_to(hungry))
            return
        hungry += resumed
        if self._blocks_needed(hungry) <= self.blocks.num_free:
            for sequence in hungry:
                self._extend(step, sequence)
            return
        by_group: dict[SequenceGroup, list[Sequence]] = {}
        for sequence in hungry:
            by_group.setdefault(sequence.group, []).append(sequence)
        # Oldest first: whoever has been served in this step is never preempted in it.
        for group in sorted(by_group, key=in_order):
            while group.state is GroupState.RUNNING and self._blocks_needed(by_group[group]) > self.blocks.num_free:
                self._preempt(step, self.running[-1])
            if group.state is GroupState.RUNNING:
                for sequence in by_group[group]:
                    self._extend(step, sequence)

    def _blocks_needed(self, sequences: list[Sequence]) -> int:
        """Blocks that `_extend` takes for these sequences together."""
        needed = 0
        writers: dict[int, int] = {}
        for sequence in sequences:
            table = sequence.block_table
            needed += max(0, self.blocks.blocks_for(len(sequence.token_ids)) - len(table))
            index = sequence.num_computed // self.limits.block_size
            if self.rows.shares_tail[sequence.row] and index < len(table):
                writers[table[index]] = writers.get(table[index], 0) + 1
        # The last owner of a block writes in place.
        return needed + sum(min(count, self.blocks.ref_counts[block] - 1) for block, count in writers.items())

    def _extend(self, step: Step, sequence: Sequence) -> None:
        """Give a sequence what `_blocks_needed` counted for it."""
        blocks, rows, table = self.blocks, self.rows, sequence.block_table
        index = sequence.num_computed // self.limits.block_size
        if rows.shares_tail[sequence.row]:
            rows.shares_tail[sequence.row] = False
            if index < len(table) and (copy := blocks.make_writable(sequence, index)) is not None:
                step.copies.append(copy)
                rows.replace_block(sequence, index)
        for _ in range(blocks.blocks_for(len(sequence.token_ids)) - len(table)):
            blocks.append(sequence)
            rows.add_block(sequence)

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admit(self, step: Step, priority: int, budget: int) -> tuple[int, bool]:
        """Start whoever is next of a class, swapped groups before waiting ones, while they fit.

        Returns what is left of the budget, and whether lower classes may go on: not while one of these waits.
        """
        line = self.waiting[priority]
        blocked: SequenceGroup | None = None
        for group in [group for group in self.swapped if group.priority == priority]:
            # One that gave way after it, for want of host memory, is its elder.
            while line and line[0].order < group.order:
                prefix = self._startable(line[0]) if budget > 0 else None
                if prefix is None:
                    return budget, False
                budget -= self._start(step, line.popleft(), prefix, budget)
            if not self._can_swap_in(group):
                blocked = group
                break
            self._swap_in(step, group)
        while line and budget > 0:
            prefix = self._startable(line[0])
            if prefix is None or (blocked is not None and not self._may_pass(line[0], blocked)):
                break
            budget -= self._start(step, line.popleft(), prefix, budget)
        return budget, not line and blocked is None

    def _startable(self, group: SequenceGroup) -> CachedPrefix | None:
        """What the cache has of the group, if it can start now."""
        if self.rows.num_free < group.num_rows:
            return None
        if _is_under_way(group):
            return None
        leader = group.unfinished[0]
        prefix = self.blocks.find_prefix(leader, self._goal(leader))
        return prefix if self.blocks.can_start(prefix, len(leader.token_ids), self._reserve_for(group)) else None

    def _reserve_for(self, group: SequenceGroup) -> int:
        """Blocks that must stay free beside a group that starts; it will need some of them when it forks."""
        # An empty engine takes anything that fits at all.
        return self._reserve + group.num_rows - 1 if self.running else 0

    def _start(self, step: Step, group: SequenceGroup, prefix: CachedPrefix, budget: int) -> int:
        """Admit a group and compute the first tokens of its leader. Returns how many."""
        leader = group.unfinished[0]
        goal = self._goal(leader)
        self.blocks.start(leader, prefix, len(leader.token_ids))
        # Of a prompt that is there already the last token is computed again, for its logits.
        leader.num_computed = min(prefix.num_tokens, goal - 1)
        self.blocks.counters.prefix_queries += goal
        self.blocks.counters.prefix_hits += prefix.num_tokens
        group.is_forked = False
        self._run(group, [leader])
        if prefix.num_tokens % self.limits.block_size:
            self.rows.shares_tail[leader.row] = True
            if len(leader.token_ids) > prefix.num_tokens:
                self._extend(step, leader)
        return self._add_chunk(step, leader, budget)

    def _can_swap_in(self, group: SequenceGroup) -> bool:
        if _is_under_way(group):
            return False
        needed = self.blocks.blocks_to_swap_in(group.unfinished) + self._reserve_for(group)
        return needed <= self.blocks.num_free and group.num_rows <= self.rows.num_free

    def _may_pass(self, group: SequenceGroup, swapped: SequenceGroup) -> bool:
        """Whether a waiting group can be admitted without delaying a swapped one that does not fit yet.

        EASY backfilling (Lifka, The ANL/IBM SP Scheduling System, 1995): the swapped group comes back, at the latest,
        once enough of its elders have ended at their longest. What has ended by then, or needs no more than is left
        over beside it, may go first.
        """
        free, rows = self.blocks.num_free, self.rows.num_free
        needed = self.blocks.blocks_to_swap_in(swapped.unfinished) + self._reserve_for(swapped)
        elders = sorted((one for one in self.running if one.order < swapped.order), key=_steps_left)
        wait = 0
        for elder in elders:
            if needed <= free and swapped.num_rows <= rows:
                break
            free += len({block for sequence in elder.sequences for block in sequence.block_table})
            rows += elder.num_rows
            wait = _steps_left(elder)
        if needed > free or swapped.num_rows > rows:
            return False  # those who passed before must end first
        if _steps_left(group) + -(-len(group.prompt) // self.max_prefill_tokens) <= wait:
            return True
        return self._blocks_at_most(group) <= free - needed and group.num_rows <= rows - swapped.num_rows

    # --- a lower class gives way --------------------------------------------------------------------------------------

    def _displace(self, step: Step) -> None:
        """Let the first waiting group take the place of lower classes if it fits no other way."""
        group = next(self.all_waiting(), None)
        if group is None or not self.running or self.running[-1].priority <= group.priority:
            return
        if any(swapped.priority <= group.priority for swapped in self.swapped) or self._startable(group) is not None:
            return
        lower = [one for one in self.running if one.priority > group.priority]
        held = Counter(block for one in lower for sequence in one.sequences for block in sequence.block_table)
        freed = sum(1 for block, count in held.items() if self.blocks.ref_counts[block] == count)
        leader = group.unfinished[0]
        prefix = self.blocks.find_prefix(leader, self._goal(leader))
        needed = self.blocks.blocks_to_start(prefix, len(leader.token_ids)) + self._reserve_for(group)
        # What the group would find in blocks of the lower ones is freed by them and taken by it.
        needed += sum(1 for block in prefix.blocks if held[block] and self.blocks.ref_counts[block] == held[block])
        rows = self.rows.num_free + sum(one.num_rows for one in lower)
        if needed > self.blocks.num_free + freed or group.num_rows > rows:
            return
        while self.running and self.running[-1].priority > group.priority and self._startable(group) is None:
            self._preempt(step, self.running[-1])
            self.counters.displaced += 1


def _is_resumed_beam(sequence: Sequence) -> bool:
    return sequence.group.beams is not None and sequence.num_output_tokens > 0


def _is_under_way(group: SequenceGroup) -> bool:
    """Whether the group was preempted in this step: only its old rows on the device have the tokens that it goes on
    with."""
    return any(sequence.token_ids[-1] == PENDING for sequence in group.unfinished)


def _steps_left(group: SequenceGroup) -> int:
    """Decode steps until the group ends at its longest."""
    return group.sampling.max_tokens - min(sequence.num_output_tokens for sequence in group.unfinished)
