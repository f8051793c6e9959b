"""The sequences that sample after a step, each with its own row of logits."""

from __future__ import annotations

import numpy as np
import torch

from quire.shared.messages import SamplingParams
from quire.worker.engine.groups import Groups
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.sampling_inputs import SamplingInputs, finish_chunks
from quire.worker.engine.sequence import SequenceGroup
from quire.worker.engine.step import DecodeBatch, PrefillChunk, Step

LIMITS = EngineLimits(num_blocks=32, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64)
PROMPT = (1, 2, 3, 4, 5, 6)


def started(groups: Groups, name: str, outputs: dict[int, list[int]] | None = None, **params: object) -> SequenceGroup:
    """A group whose leader has blocks for its known tokens and has computed none."""
    group = SequenceGroup(name, PROMPT, SamplingParams(8, **params), len(groups.running))  # type: ignore[arg-type]
    group.start(outputs)
    leader = group.sequences[0]
    groups.blocks.start(leader, groups.blocks.find_prefix(leader, 0), len(leader.token_ids))
    groups.run(group, [leader])
    return group


def logits(rows: int) -> torch.Tensor:
    """Row r is all r."""
    return torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, 3).contiguous()


def test_a_step_without_chunks_samples_its_decodes_as_they_are() -> None:
    groups = Groups(LIMITS)
    step, rows = Step(DecodeBatch.of([])), logits(2)
    inputs = finish_chunks(step, rows, groups)
    assert inputs.batch is step.decodes
    assert inputs.logits is rows


def test_a_chunk_before_the_last_is_recorded_and_samples_nothing() -> None:
    groups = Groups(LIMITS)
    [sequence] = started(groups, "r").sequences
    inputs = finish_chunks(Step(DecodeBatch.of([]), [PrefillChunk(sequence, 4, is_sampled=False)]), logits(0), groups)
    assert (sequence.num_computed, sequence.is_decoding, len(inputs.batch)) == (4, False, 0)
    assert groups.blocks.known() == {sequence.block_table[0]}


def test_choices_fork_at_the_end_of_the_prompt_and_sample_from_the_leaders_logits() -> None:
    groups = Groups(LIMITS)
    [first] = started(groups, "first").sequences
    group = started(groups, "forks", n=3)
    chunks = [PrefillChunk(first, 6, is_sampled=True), PrefillChunk(group.sequences[0], 6, is_sampled=True)]
    inputs = finish_chunks(Step(DecodeBatch.of([]), chunks), logits(2), groups)
    assert inputs.batch.sequences == [first, *group.sequences]
    assert inputs.logits[:, 0].tolist() == [0, 1, 1, 1]
    assert all(sequence.is_decoding for sequence in inputs.batch.sequences)
    assert group.is_forked


def test_choices_that_have_output_already_compute_that_before_they_sample() -> None:
    groups = Groups(LIMITS)
    group = started(groups, "resumed", {0: [7], 1: []}, n=2)
    leader, other = group.sequences
    inputs = finish_chunks(Step(DecodeBatch.of([]), [PrefillChunk(leader, 6, is_sampled=True)]), logits(1), groups)
    assert inputs.batch.sequences == [other]
    assert (leader.is_decoding, other.is_decoding) == (False, True)


def test_rows_are_split_by_a_mask_by_group_and_by_what_has_ended() -> None:
    groups = Groups(LIMITS)
    one, two = started(groups, "one"), started(groups, "two", n=2)
    inputs = SamplingInputs(DecodeBatch.of([*one.sequences, *two.sequences]), logits(3))
    wanted, rest = inputs.split(np.array([True, False, True]))
    assert wanted.batch.sequences == [one.sequences[0], two.sequences[1]]
    assert (wanted.logits[:, 0].tolist(), rest.logits[:, 0].tolist()) == ([0, 2], [1])
    [first, *_], [_, last] = one.sequences, two.sequences
    assert inputs.without([]) is inputs
    left = inputs.without([last, first])
    assert (left.batch.sequences, left.logits[:, 0].tolist()) == ([two.sequences[0]], [1])
    parts = inputs.by_group()
    assert [(group.request_id, len(part.batch), part.logits[:, 0].tolist()) for group, part in parts] == [
        ("one", 1, [0]),
        ("two", 2, [1, 2]),
    ]
