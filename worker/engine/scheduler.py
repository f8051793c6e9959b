"""Which sequences run in a step, with how many tokens each, and who has to give way.

Iteration-level scheduling under one token budget: every decoding sequence first, so that a long prompt never stalls
running streams, then chunks of prompts in order of arrival. First come, first served; when blocks run out the newest
sequence gives way and is recomputed later (paper section 4.5). So the oldest always advances, and nothing starves.

Always: a sequence is in at most one of `waiting` and `running`; both are in order of arrival; only running ones hold
blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from worker.engine.blocks import BlockManager
from worker.engine.sequence import Sequence, SequenceGroup

# Share of the blocks that admission leaves free, so that a new sequence is not preempted a few tokens later.
WATERMARK = 0.01


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine can hold at once, and in one step."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class RequestRefused(ValueError):
    """A request that could never run here, however empty the engine: which limit, and by how much."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence and how many of its remaining tokens this step computes."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_sampled(self) -> bool:
        """Whether this step computes the last known token, whose logits give the next one."""
        return self.num_tokens == self.sequence.num_remaining


class Scheduler:
    """Decides; computes nothing."""

    def __init__(self, limits: EngineLimits) -> None:
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({limits.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({limits.max_num_seqs}): every running sequence decodes one token in each step"
            )
        self.limits = limits
        self.blocks = BlockManager(limits.num_blocks, limits.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._reserve = max(1, int(WATERMARK * limits.num_blocks))

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def check_fits(self, group: SequenceGroup) -> None:
        """Raise RequestRefused if a sequence of the group could never run to its end."""
        tokens = len(group.prompt) + group.sampling.max_tokens
        if tokens > self.limits.max_model_len:
            raise RequestRefused(
                f"{len(group.prompt)} prompt tokens and max_tokens {group.sampling.max_tokens} exceed the context of "
                f"{self.limits.max_model_len} tokens"
            )
        if self.blocks.blocks_for(tokens) > self.limits.num_blocks:
            raise RequestRefused(
                f"{tokens} tokens need {self.blocks.blocks_for(tokens)} KV blocks and the cache has "
                f"{self.limits.num_blocks}"
            )

    def add(self, group: SequenceGroup) -> None:
        """Queue the unfinished sequences of a group behind all others."""
        self.waiting.extend(group.unfinished)

    def schedule(self) -> list[ScheduledSequence]:
        """The next step. Empty only if there is nothing to do."""
        budget = self.limits.max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        preemptions = self.num_preemptions

        for sequence in list(self.running):
            if sequence.num_remaining == 1 and self._make_room(sequence):
                self.blocks.allocate(sequence)
                scheduled.append(ScheduledSequence(sequence, 1))
                budget -= 1

        for sequence in self.running:
            if sequence.num_remaining > 1 and budget > 0:
                chunk = min(sequence.num_remaining, budget)
                scheduled.append(ScheduledSequence(sequence, chunk))
                budget -= chunk

        # Who was just preempted must not push out others by coming straight back.
        while self.waiting and budget > 0 and self.num_preemptions == preemptions and self._can_admit(self.waiting[0]):
            sequence = self._admit()
            chunk = min(sequence.num_remaining, budget)
            scheduled.append(ScheduledSequence(sequence, chunk))
            budget -= chunk
        return scheduled

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free what it holds. Forgetting twice does no harm."""
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def check_integrity(self) -> None:
        """Raise BlockError or AssertionError unless the invariants hold."""
        self.blocks.check_integrity(self.running)
        rows = [sequence.row for sequence in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.limits.max_num_seqs)), "rows leak"
        assert all(sequence.row < 0 and not sequence.block_table for sequence in self.waiting), "waiting holds blocks"
        for sequence in self.running:
            waste = len(sequence.block_table) * self.limits.block_size - len(sequence.token_ids)
            assert waste < self.limits.block_size, f"{sequence} holds an empty block"
        for line in (self.running, list(self.waiting)):
            arrivals = [(s.group.arrival, s.choice) for s in line]
            assert arrivals == sorted(arrivals), "not in order of arrival"

    def _can_admit(self, sequence: Sequence) -> bool:
        # An empty engine takes anything that fits at all: no reserve.
        reserve = self._reserve if self.running else 0
        return bool(self._free_rows) and self.blocks.can_allocate(sequence, reserve)

    def _admit(self) -> Sequence:
        sequence = self.waiting.popleft()
        sequence.row = self._free_rows.pop()
        self.blocks.allocate(sequence)
        self.running.append(sequence)
        return sequence

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt newest first until `sequence` can take its next token; False if it had to give way itself.

        Sequences are asked oldest first, so nobody who was scheduled in this step is ever preempted in it.
        """
        if sequence.row < 0:
            return False
        while not self.blocks.can_allocate(sequence):
            victim = self.running.pop()
            self._release(victim)
            victim.num_computed = 0
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is sequence:
                return False
        return True

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = -1
