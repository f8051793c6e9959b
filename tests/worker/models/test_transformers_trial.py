"""The texts and steps of the trial of a model: positions, slots and rows of logits."""

from __future__ import annotations

import torch

from quire.worker.models import transformers_trial as trial
from quire.worker.models.transformers_trial import BLOCK_SIZE, LENGTHS, TrialChunk


def test_texts_have_the_last_token_and_fit_the_context() -> None:
    first, second = trial.texts(50, 1000)
    assert (len(first), len(second)) == LENGTHS
    assert first[0] == 49
    assert int(torch.cat([first, second]).max()) < 50
    assert [len(text) for text in trial.texts(50, 4)] == [4, 4]


def test_a_step_has_the_positions_slots_and_rows_of_its_chunks() -> None:
    step = trial.batch([TrialChunk(0, 3, torch.tensor([7, 8, 9])), TrialChunk(1, 0, torch.tensor([5]))])
    assert step.token_ids.tolist() == [7, 8, 9, 5]
    assert step.positions.tolist() == [3, 4, 5, 0]
    assert step.slot_mapping.tolist() == [3, 4, 5, BLOCK_SIZE]
    assert step.block_tables.tolist() == [[0], [1]]
    assert step.seq_lens.tolist() == [6, 1]
    assert step.query_start_loc.tolist() == [0, 3, 4]
    assert step.logits_rows.tolist() == [2, 3]
