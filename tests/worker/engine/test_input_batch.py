"""Rows of the input batch: what a sequence finds there, and how rows are reserved, freed and changed."""

from __future__ import annotations

import numpy as np
import pytest

from quire.shared.messages import SamplingParams
from quire.worker.engine.input_batch import NO_LOGPROBS, InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.sequence import Sequence, SequenceGroup

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
