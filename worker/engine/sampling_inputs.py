"""The sequences whose next token a step gives, with the logits of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from quire.worker.engine.scheduler import Scheduler
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.step import DecodeBatch, Step
from quire.worker.models.batch import send


class SamplingInputs(NamedTuple):
    """Row r of the logits is of sequence r. The sequences of a group lie next to each other."""

    active: DecodeBatch
    logits: torch.Tensor  # float32 [R, V]

    def split(self, mask: np.ndarray) -> tuple[SamplingInputs, SamplingInputs]:
        """Those of the mask, and the others."""
        parts = []
        for wanted in (mask, ~mask):
            at = np.flatnonzero(wanted)
            logits = self.logits if len(at) == len(mask) else _rows(self.logits, at)
            parts.append(SamplingInputs(DecodeBatch.of([self.active.sequences[i] for i in at]), logits))
        return parts[0], parts[1]

    def by_group(self) -> list[tuple[SequenceGroup, SamplingInputs]]:
        """The part of each group."""
        sequences = self.active.sequences
        groups = [sequence.group for sequence in sequences]
        starts = [i for i, group in enumerate(groups) if i == 0 or group is not groups[i - 1]]
        return [
            (groups[start], SamplingInputs(DecodeBatch.of(sequences[start:end]), self.logits[start:end]))
            for start, end in zip(starts, [*starts[1:], len(groups)], strict=True)
        ]


def book(step: Step, logits: torch.Tensor, scheduler: Scheduler) -> SamplingInputs:
    """Note what was computed, let groups fork whose prompt is complete, and collect who gets a token."""
    if not step.chunks:
        return SamplingInputs(step.decodes, logits)
    sequences = [*step.decodes.sequences]
    sources = list(range(len(sequences)))
    at = len(sequences)
    for chunk in step.chunks:
        sequence, group = chunk.sequence, chunk.sequence.group
        sequence.num_computed += chunk.num_tokens
        if not group.beams or not sequence.num_output_tokens:
            scheduler.blocks.cache_full_blocks(sequence, sequence.num_computed)
        ready = []
        if chunk.is_sampled:
            ready = _ready(sequence, scheduler)
            for one in ready:
                scheduler.begin_decoding(one)
                sequences.append(one)
                sources.append(at)
            at += 1
        if group.beams and not ready and all(len(beam.token_ids) - beam.num_computed == 1 for beam in group.sequences):
            for beam in group.sequences:
                scheduler.begin_decoding(beam)
    if sources != list(range(at)):
        logits = _rows(logits, np.array(sources, dtype=np.int64))
    return SamplingInputs(DecodeBatch.of(sequences), logits)


def _rows(logits: torch.Tensor, at: np.ndarray) -> torch.Tensor:
    return logits.index_select(0, send(torch.from_numpy(at), logits.device))


def _ready(sequence: Sequence, scheduler: Scheduler) -> list[Sequence]:
    """Who draws from the logits of a sequence whose chunks are all computed."""
    group = sequence.group
    if not group.needs_fork:
        return [sequence]
    scheduler.fork(group)
    # Those that an earlier attempt, or preemption, left with outputs compute these first.
    return [one for one in group.unfinished if not one.num_output_tokens]
