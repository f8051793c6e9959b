"""The sequences that get a token in a step, with the logits of each."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch

from quire.worker.engine.groups import Groups
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.step import DecodeBatch, Step
from quire.worker.engine.transfers import send


class SamplingInputs(NamedTuple):
    """Row r of the logits belongs to sequence r. The sequences of a group are adjacent."""

    batch: DecodeBatch
    logits: torch.Tensor  # float32 [R, V]

    def split(self, mask: np.ndarray) -> tuple[SamplingInputs, SamplingInputs]:
        """Split into the rows where the mask is true and those where it is false."""
        parts = []
        for wanted in (mask, ~mask):
            at = np.flatnonzero(wanted)
            logits = self.logits if len(at) == len(mask) else select(self.logits, at)
            parts.append(SamplingInputs(DecodeBatch.of([self.batch.sequences[i] for i in at]), logits))
        return parts[0], parts[1]

    def joined(self, other: SamplingInputs) -> SamplingInputs:
        """Append the sequences of others."""
        sequences = [*self.batch.sequences, *other.batch.sequences]
        return SamplingInputs(DecodeBatch.of(sequences), torch.cat([self.logits, other.logits]))

    def without(self, ended: Collection[Sequence]) -> SamplingInputs:
        """Leave out sequences that have ended."""
        gone = set(ended).intersection(self.batch.sequences)
        return self.split(np.array([sequence not in gone for sequence in self.batch.sequences]))[0] if gone else self

    def by_group(self) -> list[tuple[SequenceGroup, SamplingInputs]]:
        """Split by group."""
        sequences = self.batch.sequences
        groups = [sequence.group for sequence in sequences]
        starts = [i for i, group in enumerate(groups) if i == 0 or group is not groups[i - 1]]
        return [
            (groups[start], SamplingInputs(DecodeBatch.of(sequences[start:end]), self.logits[start:end]))
            for start, end in zip(starts, [*starts[1:], len(groups)], strict=True)
        ]


def finish_chunks(step: Step, logits: torch.Tensor, groups: Groups) -> SamplingInputs:
    """Record the chunks that a step has computed, and fork groups whose prompt is complete.

    logits: those of the step, decodes first: float32 [R', V]. Returns the sequences that get a token, each with its row
    of logits; sequences that fork get a copy of their leader's row.
    """
    if not step.chunks:
        return SamplingInputs(step.decodes, logits)
    sequences = [*step.decodes.sequences]
    sources = list(range(len(sequences)))
    at = len(sequences)
    for chunk in step.chunks:
        sequence, group = chunk.sequence, chunk.sequence.group
        sequence.num_computed += chunk.num_tokens
        if not group.beams or not sequence.num_output_tokens:
            groups.blocks.cache_full_blocks(sequence, sequence.num_computed)
            if group.breakpoints and sequence.num_computed >= len(group.prompt):
                groups.blocks.pin_breakpoints(sequence)
        ready = []
        if chunk.is_sampled:
            ready = _ready_to_sample(sequence, groups)
            for member in ready:
                groups.begin_decoding(member)
                sequences.append(member)
                sources.append(at)
            at += 1
        if group.beams and not ready and all(len(beam.token_ids) - beam.num_computed == 1 for beam in group.sequences):
            for beam in group.sequences:
                groups.begin_decoding(beam)
    if sources != list(range(at)):
        logits = select(logits, np.array(sources, dtype=np.int64))
    return SamplingInputs(DecodeBatch.of(sequences), logits)


def select(logits: torch.Tensor, at: np.ndarray) -> torch.Tensor:
    """Return a copy of rows of logits. logits: float32 [R, V]; at: int64, indices of rows."""
    return logits.index_select(0, send(torch.from_numpy(at), logits.device))


def _ready_to_sample(sequence: Sequence, groups: Groups) -> list[Sequence]:
    """Return the sequences that sample from the logits of a sequence whose chunks are all computed."""
    group = sequence.group
    if not group.needs_fork:
        return [sequence]
    groups.fork(group)
    # Sequences that have output already, from an earlier attempt or before a preemption, compute that first.
    return [member for member in group.unfinished if not member.num_output_tokens]
