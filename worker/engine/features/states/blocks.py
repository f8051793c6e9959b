"""Blocks of a model with recurrent states: a cached prefix is usable only where the prefix cache has a snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from quire.worker.engine.blocks import BlockManager, CachedPrefix, PinnedPrefix
from quire.worker.engine.features.states.slots import StateSlots
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.sequence import Sequence
from quire.worker.engine.step import Step


@dataclass
class StatefulBlockManager(BlockManager):
    """A block manager that also owns slots for states. A snapshot lives as long as its block is cached, at most."""

    states: StateSlots = field(kw_only=True)

    @classmethod
    def of(cls, limits: EngineLimits) -> Self:
        """Return the blocks and slots of an engine."""
        states = StateSlots(limits.max_num_seqs, limits.num_state_slots, limits.snapshot_interval)
        return cls(limits.num_blocks, limits.block_size, limits.num_host_blocks, limits.prefix_caching, states=states)

    def free(self, sequence: Sequence) -> None:
        super().free(sequence)
        self.states.free(sequence)

    def find_prefix(self, sequence: Sequence, num_tokens: int) -> CachedPrefix:
        """Return the longest cached prefix with a snapshot of the state at its end.

        At least one token is left to compute: a state at the end of all tokens has computed the last one already, and
        its logits are wanted.
        """
        blocks: list[int] = []
        count = 0
        for index in range((num_tokens - 1) // self.block_size):
            key = self._hash(sequence, index)
            if (block := self._block_of.get(key)) is None:
                break
            blocks.append(block)
            if self.states.find(key) is not None:
                count = index + 1
        return CachedPrefix(blocks[:count], count * self.block_size)

    def restore_state(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        """Copy the snapshot at the end of a prefix to the slot of a running sequence."""
        if prefix.blocks:
            self.states.restore(self._hash(sequence, len(prefix.blocks) - 1), sequence.row)

    def plan_snapshots(self, sequence: Sequence, first: int, end: int, prompt_end: int) -> list[tuple[int, int]]:
        """Take slots for snapshots of a chunk of tokens first .. end - 1.

        prompt_end: the number of tokens that the sequence computes in chunks. Returns numbers of tokens, counted from
        the beginning of the sequence, and slots.
        """
        if not self.prefix_caching:
            return []
        size, interval = self.block_size, self.states.interval
        ends = {*range(first - first % interval + interval, end + 1, interval)}
        # The last full block, and the last one that an equal prompt can use.
        ends |= {prompt_end // size * size, (prompt_end - 1) // size * size}
        ends.add(self._branch_point(sequence, first, end, prompt_end))
        taken = []
        for count in sorted((at for at in ends if first < at <= end), reverse=True):  # the last one matters most
            if self.states.find(self._hash(sequence, count // size - 1)) is None:
                slot = self.states.hold(sequence, count)
                if slot is not None:
                    taken.append((count, slot))
        return taken

    def plan_copies(self, step: Step, input_batch: InputBatch) -> None:
        """Add the copies of states to a step. A decode that fills a block leaves a snapshot there."""
        if self.prefix_caching:
            rows = step.decodes.rows
            fills = (input_batch.lengths[rows] % self.block_size == 0) & ~input_batch.is_beam[rows]
            for index in np.flatnonzero(fills).tolist():
                sequence = step.decodes.sequences[index]
                slot = self.states.hold_last(sequence, len(sequence.token_ids))
                if slot is not None:
                    step.decode_snapshots.append((index, slot))
        step.state_copies = self.states.take_copies()

    def _branch_point(self, sequence: Sequence, first: int, end: int, prompt_end: int) -> int:
        """Return the number of tokens in first .. end at which an earlier prompt takes another way; else at most first.

        The cached blocks of the sequence's tokens end there. Later prompts with this beginning are likely to part at
        the same place.
        """
        size, index = self.block_size, first // self.block_size
        while (index + 1) * size <= min(end + size, prompt_end) and self._hash(sequence, index) in self._block_of:
            index += 1
        return index * size if index * size <= end else first

    def cache_full_blocks(self, sequence: Sequence, num_computed: int) -> None:
        """Add full blocks to the prefix cache, and the snapshots that the sequence holds of them."""
        super().cache_full_blocks(sequence, num_computed)
        for count in sorted(at for at in sequence.held_snapshots if at <= num_computed):
            key = self._hash(sequence, count // self.block_size - 1)
            self.states.keep(sequence, count, key if key in self._block_of else None)

    def pin(self, name: str, sequence: Sequence) -> PinnedPrefix:
        """Protect the full blocks of a computed sequence, and the snapshot at the end of the last one, from eviction.

        The sequence has a full block, and there was a slot for its snapshot.
        """
        prefix = super().pin(name, sequence)
        self.states.pin(self._hash(sequence, prefix.num_tokens // self.block_size - 1))
        return prefix

    def _forget(self, block: int) -> None:
        key = self._hash_of.get(block)
        super()._forget(block)
        if key is not None:
            self.states.forget(key)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise BlockError or SlotError unless every block and every slot is accounted for."""
        sequences = list(sequences)
        super().check_integrity(sequences)
        self.states.check_integrity(sequences, self._block_of)
