"""The input batch, and the inputs of sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.groups import Groups
from quire.worker.engine.input_batch import NO_LOGPROBS, InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.sampling_inputs import SamplingInputs, finish_chunks
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.step import DecodeBatch, PrefillChunk, Step

SIZE = 4


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(
        EngineLimits(num_blocks=16, block_size=SIZE, max_num_seqs=3, max_num_batched_tokens=8, max_model_len=16)
    )


def group(n: int = 1, **params: object) -> SequenceGroup:
    made = SequenceGroup("r", (7, 8, 9), SamplingParams(**({"max_tokens": 5, "n": n} | params)))  # type: ignore[arg-type]
    made.start()
    for sequence in made.sequences:
        sequence.block_table = [2]
    return made


def assigned(batch: InputBatch, **params: object) -> Sequence:
    made = group(**params)
    batch.reserve(made, 1)
    batch.assign(made.sequences[0])
    return made.sequences[0]


def test_a_row_has_what_the_sequence_and_its_request_say(batch: InputBatch) -> None:
    sequence = assigned(batch, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=11, logprobs=True, top_logprobs=2)
    row = sequence.row
    assert batch.block_tables[row, :1].tolist() == [2]
    assert (batch.lengths[row], batch.prompt_lengths[row], batch.capacities[row]) == (3, 3, SIZE)
    assert (batch.last_tokens[row], batch.max_lengths[row]) == (9, 8)
    params = (batch.temperatures[row], batch.top_ks[row], batch.top_ps[row], batch.min_ps[row], batch.seeds[row])
    assert params == pytest.approx((0.5, 3, 0.9, 0.1, 11))
    assert (batch.is_scored[row], batch.top_logprobs[row]) == (True, 2)


@pytest.mark.parametrize(
    ("column", "params"),
    [
        ("is_drawn", {"temperature": 1.0}),
        ("is_adjusted", {"presence_penalty": 0.5}),
        ("is_adjusted", {"repetition_penalty": 1.5}),
        ("is_adjusted", {"logit_bias": ((3, 1.0),)}),
        ("is_adjusted", {"min_tokens": 2}),
        ("is_adjusted", {"grammar": "{}"}),
        ("is_watched", {"stop": ("a",)}),
        ("is_watched", {"stop_token_ids": (4,)}),
        ("is_scored", {"logprobs": True}),
        ("is_scored", {"best_of": 2, "temperature": 1.0}),
        ("is_beam", {"beam_width": 2}),
        ("ignores_eos", {"ignore_eos": True}),
    ],
)
def test_each_parameter_sets_its_flag_and_only_for_its_own_row(
    batch: InputBatch, column: str, params: dict[str, object]
) -> None:
    plain = assigned(batch, temperature=0.0)
    special = assigned(batch, **({"temperature": 0.0} | params))
    flags = getattr(batch, column)
    assert (flags[plain.row], flags[special.row]) == (False, True)


def test_a_row_that_is_taken_again_keeps_nothing_of_its_last_sequence(batch: InputBatch) -> None:
    first = assigned(batch, temperature=1.0, logprobs=True, top_logprobs=5, stop=("a",), presence_penalty=1.0)
    row = first.row
    batch.shares_tail[row] = True
    batch.release(first)
    second = assigned(batch, temperature=0.0)
    assert second.row == row
    flags = (batch.is_drawn, batch.is_adjusted, batch.is_watched, batch.is_scored, batch.shares_tail)
    assert not any(flag[row] for flag in flags)
    assert batch.top_logprobs[row] == NO_LOGPROBS


def test_reserved_rows_are_not_free_until_they_are_given_up(batch: InputBatch) -> None:
    made = group(n=2)
    batch.reserve(made, 2)
    assert (batch.num_free, made.num_reserved_rows) == (1, 2)
    batch.assign(made.sequences[0])
    assert (batch.num_free, made.num_reserved_rows) == (1, 1)
    batch.release(made.sequences[0], keep=True)
    assert (batch.num_free, made.num_reserved_rows, made.sequences[0].row) == (1, 2, -1)
    batch.reserve(made, -2)
    assert batch.num_free == 3


def test_changes_of_tables_are_listed_for_a_runner_that_keeps_a_copy(batch: InputBatch) -> None:
    batch.changes = []
    one, other = assigned(batch), assigned(batch)
    copy = np.zeros_like(batch.block_tables)
    one.block_table.append(5)
    batch.add_block(one)
    other.block_table[0] = 6
    batch.replace_block(other, 0)
    batch.add_blocks(np.array([one.row, other.row]), [9, 10])
    for rows, columns in batch.changes:
        copy[rows, columns] = batch.block_tables[rows, columns]
    assert copy[one.row].tolist() == batch.block_tables[one.row].tolist() == [2, 5, 9, 0]
    assert copy[other.row].tolist() == batch.block_tables[other.row].tolist() == [6, 10, 0, 0]
    assert batch.capacities[[one.row, other.row]].tolist() == [3 * SIZE, 2 * SIZE]


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
