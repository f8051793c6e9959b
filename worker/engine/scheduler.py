"""The scheduler: which sequences run in a step, with how many tokens each, and which groups are preempted.

NOTE: There is no prefill phase and no decode phase. Every sequence has `num_computed` tokens in the cache and
`len(token_ids)` known tokens, and each step lets some sequences catch up under one token budget. A decoding sequence is
one token short, a new prompt all of them, a prompt in chunks or a resumed sequence something in between. Decodes get
their tokens first, so that a long prompt never stalls running streams; chunks of prompts share the rest of the budget.

Groups are admitted first come, first served within a priority class. When a running sequence needs a block and none is
free, the newest group of the lowest class is preempted: its blocks are freed and recomputed later, as one new prompt,
or swapped out to host memory and back in. So the oldest group always advances, and no group starves. Swapped groups
come back before waiting groups are admitted; a waiting group may pass a swapped one if that does not delay it.

A step that computes prompts of a higher class leaves out the lowest class, `batch`, so that the first token of a call
that has a waiting client does not wait for the decodes of batches as well. When such a call arrives, the running step
ends early if it `may_be_interrupted`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from quire.shared.protocol.messages import SCORE
from quire.worker.engine.blocks import BlockManager, CachedPrefix
from quire.worker.engine.groups import NUM_PRIORITIES, Groups, in_order
from quire.worker.engine.limits import MAX_SCORED_POSITIONS, EngineLimits, RequestRefused
from quire.worker.engine.sequence import LOWEST_PRIORITY, PENDING, GroupState, Sequence, SequenceGroup
from quire.worker.engine.spill import Spill
from quire.worker.engine.step import DecodeBatch, PrefillChunk, Step

# Share of the blocks that admission leaves free, so that a new sequence is not preempted a few tokens later.
WATERMARK = 0.01
# Number of steps in a row that may leave out the lowest class, so that it always advances.
MAX_LEFT_OUT = 8
# Blocks that a prompt to score waits for, if the step computes them for another one.
MIN_AWAITED_BLOCKS = 2


class Scheduler:
    """Decides what each step computes, over the groups that it holds. Computes nothing itself."""

    def __init__(self, limits: EngineLimits, blocks: BlockManager | None = None) -> None:
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({limits.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({limits.max_num_seqs}): every running sequence decodes one token in each step"
            )
        self.limits = limits
        self.groups = Groups(limits, blocks)
        self.blocks = self.groups.blocks
        self.input_batch = self.groups.input_batch
        # Token budget of a step. The engine lowers it when device memory runs out.
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        # Prompt tokens of a step that also decodes. The engine may change it before each step.
        self.max_prefill_tokens = limits.max_prefill_tokens or limits.max_num_batched_tokens
        # Blocks that the prefix cache has evicted, and that may come back; None without.
        self.spill: Spill | None = None
        self._watermark_blocks = max(1, int(WATERMARK * limits.num_blocks))
        # Steps in a row that have left out the lowest class or were interrupted; and that number before the newest step
        # that has the class.
        self._num_left_out = self._num_left_out_before = 0

    # --- limits of a request ------------------------------------------------------------------------------------------

    def check_fits(self, group: SequenceGroup) -> None:
        """Raise RequestRefused if the group could not run to its end even in an empty engine."""
        tokens, count = len(group.prompt) + group.max_tokens, group.sampling.num_sequences
        if tokens > self.limits.max_model_len and group.pooling:
            raise RequestRefused(f"{tokens} prompt tokens exceed the context of {self.limits.max_model_len} tokens")
        if tokens > self.limits.max_model_len:
            raise RequestRefused(
                f"{len(group.prompt)} prompt tokens and max_tokens {group.sampling.max_tokens} exceed the context of "
                f"{self.limits.max_model_len} tokens"
            )
        if count > self.limits.max_num_seqs:
            raise RequestRefused(
                f"{count} sequences at once are more than the {self.limits.max_num_seqs} that run here (max_num_seqs)"
            )
        needed, available = self._max_blocks(group), self.limits.num_blocks - self.blocks.num_pinned
        if needed > available:
            available += self._num_pinned_blocks(group)
        if needed > available:
            raise RequestRefused(
                f"{tokens} tokens{f' in {count} sequences' if count > 1 else ''} need {needed} KV blocks and the cache "
                f"has {available}"
            )

    def _max_blocks(self, group: SequenceGroup) -> int:
        """Return the blocks of the group when all its sequences are of maximum length and share only the prompt."""
        tokens = len(group.prompt) + group.max_tokens
        shared = len(group.prompt) // self.blocks.block_size
        return shared + group.sampling.num_sequences * (self.blocks.blocks_for(tokens) - shared)

    def _num_pinned_blocks(self, group: SequenceGroup) -> int:
        """Return how many full blocks of the group's prompt are pinned."""
        pinned = {block for prefix in self.blocks.pinned for block in prefix.blocks}
        end = 0 if group.pooling == "mean" else len(group.prompt)
        prefix = self.blocks.find_prefix(Sequence(group, 0, group.prompt), end)
        return sum(1 for block in prefix.blocks[: prefix.num_tokens // self.blocks.block_size] if block in pinned)

    # --- the next step ------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Return the next step. A step without tokens means that there is nothing to compute."""
        groups = self.groups
        step = Step(groups.decodes)
        # 1) A waiting group of a higher class may preempt lower ones. 2) Running sequences take the blocks they need.
        self._preempt_lower_classes(step)
        num_preemptions = groups.num_preemptions
        self._allocate_blocks(step)
        groups.refresh()
        # 3) Each decoding sequence gets one token of the budget.
        step.decodes = groups.decodes
        budget = self.max_num_batched_tokens - len(step.decodes)
        if step.decodes:
            budget = min(budget, self.max_prefill_tokens)
        # 4) Chunks of running sequences get the rest, then newly admitted groups, class by class. A group preempted in
        # this step must not preempt others by coming straight back.
        prefills = groups.prefills
        admits = groups.num_preemptions == num_preemptions
        for priority in range(NUM_PRIORITIES):
            if priority == LOWEST_PRIORITY and self._leave_out_lowest(step):
                break
            for sequence in prefills:
                if sequence.group.priority == priority:
                    budget -= self._add_chunk(step, sequence, budget)
            if admits:
                budget, admits = self._admit(step, priority, budget)
        if self.groups.state_blocks is not None:
            self.groups.state_blocks.plan_copies(step, self.input_batch)
        return step

    def _leave_out_lowest(self, step: Step) -> bool:
        """Take the lowest class out of a step that computes prompts of a higher class. Returns False if it stays in."""
        if not step.chunks or self._num_left_out >= MAX_LEFT_OUT:
            self._num_left_out_before, self._num_left_out = self._num_left_out, 0
            return False
        higher = [sequence for sequence in step.decodes.sequences if sequence.group.priority < LOWEST_PRIORITY]
        if len(higher) < len(step.decodes):
            step.decodes = DecodeBatch.of(higher)
            self.groups.changed()  # the next step has all decodes again
        self._num_left_out += 1
        return True

    def may_be_interrupted(self, step: Step) -> bool:
        """Return whether the newest step computes the lowest class, no prompt of a higher one, and need not advance.

        A step with both has the lowest class because that was left out before. Interruptions count like steps that left
        it out, so calls that arrive all the time cannot stop it.
        """
        if self._num_left_out_before >= MAX_LEFT_OUT:
            return False
        chunks = [chunk.sequence.group.priority for chunk in step.chunks]
        has_lowest = (
            bool(chunks)
            or step.decodes.has_lowest
            or any(verification.sequence.group.priority == LOWEST_PRIORITY for verification in step.verifications)
        )
        return all(priority == LOWEST_PRIORITY for priority in chunks) and has_lowest

    def note_interrupted(self) -> None:
        """Note that the newest step ended without results."""
        self._num_left_out = self._num_left_out_before + 1

    def _add_chunk(self, step: Step, sequence: Sequence, budget: int) -> int:
        """Add the sequence's next chunk to the step, within the budget. Returns the number of its tokens."""
        left = self._prefill_end(sequence) - sequence.num_computed
        count, scores, num_scored = max(0, min(left, budget)), sequence.group.prompt_scores, 0
        most, images = left, sequence.group.images
        if scores is not None:
            most = min(left, scores.max_tokens(sequence.num_computed, MAX_SCORED_POSITIONS - step.num_scored))
            count = min(count, most)
        if count and images is not None:
            first, end = (at - sequence.num_computed for at in images.divided_by(sequence.num_computed + count))
            room = self.limits.max_num_batched_tokens - step.num_tokens
            # An image that begins here may exceed the rest of the budget.
            count = first or (end if end <= min(most, room) else 0)
        if count and images is not None:
            count = images.max_tokens(sequence.num_computed, count)
        if scores is not None:
            num_scored = scores.num_positions(sequence.num_computed + count)
        if count:
            # The last chunk of a leader lets the other sequences fork, also those of beams that are sampled later.
            samples = sequence.group.max_tokens and (sequence.group.needs_fork or not _is_resumed_beam(sequence))
            snapshots = self._plan_snapshots(sequence, count)
            step.chunks.append(PrefillChunk(sequence, count, count == left and bool(samples), num_scored, snapshots))
            step.num_scored += num_scored
        return count

    def _plan_snapshots(self, sequence: Sequence, count: int) -> tuple[tuple[int, int], ...]:
        """Take slots for copies of the recurrent state in the sequence's next `count` tokens."""
        blocks = self.groups.state_blocks
        if blocks is None or _is_resumed_beam(sequence):
            return ()
        first = sequence.num_computed
        taken = blocks.plan_snapshots(sequence, first, first + count, self._prefill_end(sequence))
        return tuple((end - first, slot) for end, slot in taken)

    @staticmethod
    def _prefill_end(sequence: Sequence) -> int:
        """Return the number of tokens that a sequence computes in chunks before it decodes.

        A leader stops where the other sequences fork. A beam stops before its last token, because the beams of a group
        are sampled in one step, all together.
        """
        if sequence.group.needs_fork:
            return sequence.num_prompt_tokens
        return len(sequence.token_ids) - _is_resumed_beam(sequence)

    # --- blocks of running groups -------------------------------------------------------------------------------------

    def _allocate_blocks(self, step: Step) -> None:
        """Give every running sequence blocks for its known tokens. Preempts the newest groups until blocks suffice."""
        self.groups.refresh()
        batch, decodes = self.input_batch, self.groups.decodes
        rows = decodes.rows
        is_full = batch.lengths[rows] > batch.capacities[rows]
        shares = batch.shares_tail[rows]
        short = [decodes.sequences[i] for i in np.flatnonzero(is_full | shares)]
        resumed = [
            sequence
            for sequence in self.groups.prefills
            if batch.lengths[sequence.row] > batch.capacities[sequence.row] or batch.shares_tail[sequence.row]
        ]
        if not short and not resumed:
            return
        if not resumed and len(short) <= self.blocks.num_free and not shares.any():
            # The common case: each of these sequences has filled its last block and gets one more.
            batch.add_blocks(rows[is_full], self.blocks.append_to(short))
            return
        short += resumed
        if self._num_blocks_short(short) <= self.blocks.num_free:
            for sequence in short:
                self._extend(step, sequence)
            return
        by_group: dict[SequenceGroup, list[Sequence]] = {}
        for sequence in short:
            by_group.setdefault(sequence.group, []).append(sequence)
        # Oldest first: a group that has got its blocks in this step is not preempted in this step.
        for group in sorted(by_group, key=in_order):
            while group.state is GroupState.RUNNING and self._num_blocks_short(by_group[group]) > self.blocks.num_free:
                self.groups.preempt(step, self.groups.running[-1])
            if group.state is GroupState.RUNNING:
                for sequence in by_group[group]:
                    self._extend(step, sequence)

    def _num_blocks_short(self, sequences: list[Sequence]) -> int:
        """Free blocks that `_extend` takes for these sequences together."""
        needed = 0
        writers: dict[int, int] = {}
        for sequence in sequences:
            table = sequence.block_table
            needed += max(0, self.blocks.blocks_for(len(sequence.token_ids)) - len(table))
            index = sequence.num_computed // self.limits.block_size
            if self.input_batch.shares_tail[sequence.row] and index < len(table):
                writers[table[index]] = writers.get(table[index], 0) + 1
        # The last owner of a block writes in place.
        return needed + sum(min(count, self.blocks.ref_counts[block] - 1) for block, count in writers.items())

    def _extend(self, step: Step, sequence: Sequence) -> None:
        """Allocate blocks for all known tokens of a sequence, and make the block of its next token writable."""
        blocks, batch, table = self.blocks, self.input_batch, sequence.block_table
        index = sequence.num_computed // self.limits.block_size
        if batch.shares_tail[sequence.row]:
            batch.shares_tail[sequence.row] = False
            if index < len(table) and (copy := blocks.make_writable(sequence, index)) is not None:
                step.copies.append(copy)
                batch.replace_block(sequence, index)
        for _ in range(blocks.blocks_for(len(sequence.token_ids)) - len(table)):
            blocks.append(sequence)
            batch.add_block(sequence)

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admit(self, step: Step, priority: int, budget: int) -> tuple[int, bool]:
        """Start the next groups of a class while they fit, swapped groups before waiting ones.

        Returns the rest of the budget, and whether lower classes may be admitted: only if no group of this class is
        left waiting.
        """
        queue = self.groups.waiting[priority]
        blocked: SequenceGroup | None = None
        for group in [group for group in self.groups.swapped if group.priority == priority]:
            # A waiting group may be older than a swapped one: host memory did not suffice when it was preempted.
            while queue and queue[0].order < group.order:
                prefix = self._can_start(step, queue[0]) if budget > 0 else None
                if prefix is None:
                    return budget, False
                budget -= self._start(step, queue.popleft(), prefix, budget)
            if not self._can_swap_in(group):
                blocked = group
                break
            self.groups.swap_in(step, group)
        while queue and budget > 0:
            prefix = self._can_start(step, queue[0])
            if prefix is None or (blocked is not None and not self._may_pass(queue[0], blocked)):
                break
            if self._waits_for_beginning(step, queue[0], prefix):
                break
            budget -= self._start(step, queue.popleft(), prefix, budget)
        return budget, not queue and blocked is None

    def _waits_for_beginning(self, step: Step, group: SequenceGroup, prefix: CachedPrefix) -> bool:
        """Return whether the step computes blocks with which a prompt to score begins: the next step finds them cached.

        The prompts of a call that ranks documents have a query in common, and arrive together.
        """
        if group.pooling != SCORE:
            return False
        leader = group.unfinished[0]
        last, end = prefix.num_tokens // self.limits.block_size + MIN_AWAITED_BLOCKS - 1, self._prefix_end(leader)
        return any(
            self.blocks.shares_block(leader, other, last, min(end, other.num_computed + chunk.num_tokens))
            for chunk in step.chunks
            if (other := chunk.sequence).group.pooling == SCORE
        )

    def _can_start(self, step: Step, group: SequenceGroup) -> CachedPrefix | None:
        """Return what `_fits` does; or None, for a while, if more of the group's prefix is being read back.

        The spill writes to free blocks at once, but the blocks that the step swaps out are free before they are copied.
        The other moves are safe: their sources and targets have owners.
        """
        prefix, leader = self._fits(group), group.unfinished[0]
        if prefix is None or self.spill is None or step.swap_out:
            return prefix
        is_delayed = self.spill.delays(leader, prefix, self._prefix_end(leader))
        return None if is_delayed else self._fits(group)

    def _fits(self, group: SequenceGroup) -> CachedPrefix | None:
        """Return the group's cached prefix, which may be empty, if there is room for the group; else None."""
        if self.input_batch.num_free < group.num_rows:
            return None
        if _has_pending_tokens(group):
            return None
        leader = group.unfinished[0]
        prefix = self._cached_prefix(leader)
        return prefix if self.blocks.can_start(prefix, len(leader.token_ids), self._num_reserved(group)) else None

    def _cached_prefix(self, leader: Sequence) -> CachedPrefix:
        """Return the cached prefix that a group may start with."""
        return self.blocks.find_prefix(leader, self._prefix_end(leader))

    def _prefix_end(self, leader: Sequence) -> int:
        """Return how many tokens a group need not compute if they are cached.

        A prompt to score may use only its scored positions. The mean of hidden states needs all tokens computed.
        """
        end, scores = self._prefill_end(leader), leader.group.prompt_scores
        if scores is not None and not scores.is_complete:
            end = min(end, scores.num_scored)
        return 0 if leader.group.pooling == "mean" else end

    def _num_reserved(self, group: SequenceGroup) -> int:
        """Return how many blocks must stay free when a group starts: the watermark, and the blocks for its forks."""
        # An empty engine admits any group that fits at all.
        return self._watermark_blocks + group.num_rows - 1 if self.groups.running else 0

    def _start(self, step: Step, group: SequenceGroup, prefix: CachedPrefix, budget: int) -> int:
        """Admit a group, and add the first chunk of its leader to the step. Returns the number of tokens added."""
        leader = group.unfinished[0]
        end = self._prefill_end(leader)
        self.blocks.start(leader, prefix, len(leader.token_ids))
        # If the whole prompt is cached, its last token is computed again for its logits.
        leader.num_computed = min(prefix.num_tokens, end - 1)
        if group.images is not None:
            leader.num_computed, _ = group.images.divided_by(leader.num_computed)
        self.blocks.counters.prefix_queries += end
        self.blocks.counters.prefix_hits += prefix.num_tokens
        if group.num_cached_tokens < 0:
            group.num_cached_tokens = min(prefix.num_tokens, len(group.prompt))
        group.is_forked = False
        self.groups.run(group, [leader])
        if self.groups.state_blocks is not None:
            self.groups.state_blocks.restore_state(leader, prefix)
        if prefix.num_tokens % self.limits.block_size:
            self.input_batch.shares_tail[leader.row] = True
            if len(leader.token_ids) > prefix.num_tokens:
                self._extend(step, leader)
        return self._add_chunk(step, leader, budget)

    def _can_swap_in(self, group: SequenceGroup) -> bool:
        if _has_pending_tokens(group):
            return False
        needed = self.blocks.blocks_to_swap_in(group.unfinished) + self._num_reserved(group)
        return needed <= self.blocks.num_free and group.num_rows <= self.input_batch.num_free

    def _may_pass(self, group: SequenceGroup, swapped: SequenceGroup) -> bool:
        """Return whether a waiting group can be admitted without delaying a swapped one that does not fit yet.

        EASY backfilling (Lifka, The ANL/IBM SP Scheduling System, 1995). The swapped group comes back, at the latest,
        once enough older groups have reached their maximum length. A waiting group may go first if it has ended by
        then, or if it needs no more than what the swapped group leaves free.
        """
        free, rows = self.blocks.num_free, self.input_batch.num_free
        needed = self.blocks.blocks_to_swap_in(swapped.unfinished) + self._num_reserved(swapped)
        older = sorted((other for other in self.groups.running if other.order < swapped.order), key=_steps_left)
        steps = 0
        for other in older:
            if needed <= free and swapped.num_rows <= rows:
                break
            free += len({block for sequence in other.sequences for block in sequence.block_table})
            rows += other.num_rows
            steps = _steps_left(other)
        if needed > free or swapped.num_rows > rows:
            return False  # newer groups that have passed already must end first
        if _steps_left(group) + -(-len(group.prompt) // self.max_prefill_tokens) <= steps:
            return True
        return self._max_blocks(group) <= free - needed and group.num_rows <= rows - swapped.num_rows

    # --- preemption by class ------------------------------------------------------------------------------------------

    def _preempt_lower_classes(self, step: Step) -> None:
        """Preempt groups of lower classes for the first waiting group if it fits in no other way."""
        running, ref_counts = self.groups.running, self.blocks.ref_counts
        group = next(self.groups.all_waiting(), None)
        if group is None or not running or running[-1].priority <= group.priority:
            return
        if any(other.priority <= group.priority for other in self.groups.swapped) or self._fits(group) is not None:
            return
        lower = [other for other in running if other.priority > group.priority]
        held = Counter(block for other in lower for sequence in other.sequences for block in sequence.block_table)
        freed = sum(1 for block, count in held.items() if ref_counts[block] == count)
        leader = group.unfinished[0]
        prefix = self._cached_prefix(leader)
        needed = self.blocks.blocks_to_start(prefix, len(leader.token_ids)) + self._num_reserved(group)
        # Blocks of the prefix that only lower classes hold count as freed, but the group takes them again.
        needed += sum(1 for block in prefix.blocks if held[block] and ref_counts[block] == held[block])
        rows = self.input_batch.num_free + sum(other.num_rows for other in lower)
        if needed > self.blocks.num_free + freed or group.num_rows > rows:
            return
        while running and running[-1].priority > group.priority and self._fits(group) is None:
            self.groups.preempt(step, running[-1])
            self.groups.counters.for_higher_class += 1


def _is_resumed_beam(sequence: Sequence) -> bool:
    return sequence.group.beams is not None and sequence.num_output_tokens > 0


def _has_pending_tokens(group: SequenceGroup) -> bool:
    """Return whether the host does not know a token of the group yet: the group was preempted with a step in flight.

    Only the group's former rows on the device hold the token, so the group cannot resume before the host knows it.
    """
    return any(sequence.token_ids[-1] == PENDING for sequence in group.unfinished)


def _steps_left(group: SequenceGroup) -> int:
    """Decode steps until the group reaches its maximum length."""
    return group.max_tokens - min(sequence.num_output_tokens for sequence in group.unfinished)
