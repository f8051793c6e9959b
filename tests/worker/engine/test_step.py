"""A step as data: its columns, and the tokens that it adds to the sequences' own lists."""

from __future__ import annotations

from itertools import repeat

from quire.shared.messages import SamplingParams
from quire.worker.engine.sequence import PENDING, Sequence, SequenceGroup
from quire.worker.engine.step import DecodeBatch, PrefillChunk, Step


def sequences(count: int, **params: object) -> list[Sequence]:
    group = SequenceGroup("r", (1, 2), SamplingParams(4, n=count, **params))  # type: ignore[arg-type]
    group.start()
    for row, sequence in enumerate(group.sequences):
        sequence.row = 10 + row
    return group.sequences


def test_columns_are_those_of_the_sequences() -> None:
    both, [single] = sequences(2), sequences(1, logprobs=True)
    batch = DecodeBatch.of([*both, single])
    assert batch.rows.tolist() == [10, 11, 10]
    assert batch.request_ids == ["r"] * 3
    assert (batch.are_single, batch.with_logprobs, batch.with_history) == (False, [2], [])
    assert DecodeBatch.of([single, *sequences(2, presence_penalty=1.0)]).with_history == [1, 2]
    assert DecodeBatch.of([single]).are_single
    assert (len(batch), len(DecodeBatch.of([]))) == (3, 0)


def test_tokens_are_appended_to_and_set_in_the_sequences_themselves() -> None:
    both = sequences(2)
    batch = DecodeBatch.of(both)
    batch.append_tokens(repeat(PENDING))
    assert [one.token_ids for one in both] == [[1, 2, PENDING]] * 2
    batch.append_tokens([5, 6])
    batch.set_tokens([2, 2], [3, 4])
    assert [one.token_ids for one in both] == [[1, 2, 3, 5], [1, 2, 4, 6]]


def test_a_step_counts_decodes_and_tokens_of_chunks() -> None:
    both = sequences(2)
    step = Step(DecodeBatch.of(both))
    assert (step.num_tokens, step.num_prefill_tokens) == (2, 0)
    step.chunks += [PrefillChunk(both[0], 5, is_sampled=False), PrefillChunk(both[1], 7, is_sampled=True)]
    assert (step.num_tokens, step.num_prefill_tokens) == (14, 12)
