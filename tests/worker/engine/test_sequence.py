"""Sequences and groups as data: the computed tokens, the tokens already in results, and the needs of a request."""

from __future__ import annotations

from typing import Any

import pytest

from quire.shared.messages import SamplingParams
from quire.worker.engine.sequence import PENDING, Sequence, SequenceGroup


def group(**params: Any) -> SequenceGroup:
    return SequenceGroup("r", (1, 2, 3), SamplingParams(**({"max_tokens": 4} | params)))


def test_a_decoding_sequence_has_computed_all_tokens_but_its_newest() -> None:
    sequence = Sequence(group(), 0, (1, 2, 3))
    sequence.num_computed = 2
    assert sequence.num_computed == 2
    sequence.token_ids += [4, 5]
    sequence.is_decoding = True
    assert (sequence.num_computed, sequence.num_output_tokens, sequence.output) == (4, 2, (4, 5))


def test_a_copy_shares_no_list_with_its_original() -> None:
    original = Sequence(group(presence_penalty=1.0), 0, (1, 2), (3,))
    original.block_table, original.logprob = [7], -1.5
    copy = original.copy(2)
    assert (copy.choice, copy.token_ids, copy.num_prompt_tokens, copy.logprob) == (2, [1, 2, 3], 2, -1.5)
    assert (copy.block_table, copy.row) == ([], -1)
    copy.token_ids.append(4)
    assert copy.seen is not None
    assert original.seen is not None
    copy.seen.add(4)
    assert (original.token_ids, original.seen.ids.tolist(), copy.seen.ids.tolist()) == ([1, 2, 3], [3], [3, 4])


@pytest.mark.parametrize(("params", "count"), [({}, 1), ({"n": 3}, 3), ({"best_of": 4}, 4), ({"beam_width": 5}, 1)])
def test_a_group_starts_with_a_sequence_for_each_choice_and_one_for_all_beams(params: Any, count: int) -> None:
    made = group(**params)
    made.start({0: [8, 9]})
    assert len(made.sequences) == count
    assert made.sequences[0].output == (8, 9)
    assert made.num_rows == (params.get("beam_width") or count)
    assert made.is_single is (params == {})
    assert made.needs_fork is (count > 1)


def test_tokens_that_are_pending_have_not_been_emitted() -> None:
    made = group(n=2)
    made.start({0: [8, 9], 1: [7]})
    assert made.num_emitted == 3
    made.sequences[0].token_ids[-1] = PENDING
    made.sequences[1].token_ids += [PENDING]
    assert made.num_emitted == 2
    ranked = group(best_of=2)
    ranked.start({0: [8]})
    assert ranked.num_emitted == 0


@pytest.mark.parametrize(
    ("params", "is_synchronous"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_k": 3, "n": 2}, False),
        ({"stop": ("a",), "stop_token_ids": (4,)}, False),
        ({"presence_penalty": 0.5}, False),
        ({"min_tokens": 2}, False),
        ({"logit_bias": ((1, 2.0),)}, False),
        ({"grammar": "{}"}, False),
        ({"logprobs": True, "top_logprobs": 3}, False),
        ({"best_of": 2}, False),
        ({"beam_width": 2}, True),
        ({"prompt_logprobs": 0}, True),
        ({"max_tokens": 0}, True),
    ],
)
def test_a_request_is_synchronous_if_the_host_needs_its_tokens_or_logits(params: Any, is_synchronous: bool) -> None:
    made = group(**params)
    made.start()
    assert made.is_synchronous is is_synchronous


@pytest.mark.parametrize(
    ("params", "has_history"),
    [
        ({}, False),
        ({"min_tokens": 2, "logit_bias": ((1, 2.0),), "allowed_token_ids": (1, 2)}, False),
        ({"logprobs": True}, False),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"grammar": "{}"}, True),
    ],
)
def test_penalties_and_grammars_depend_on_the_tokens_so_far(params: Any, has_history: bool) -> None:
    made = group(**params)
    made.start()
    assert made.has_history is has_history


def test_banned_words_depend_on_the_tokens_so_far() -> None:
    made = group()
    made.bad_words = ((3, 4),)
    made.start()
    assert made.has_history


def test_log_probabilities_leave_once_and_only_if_they_are_asked_for() -> None:
    asked, plain = (Sequence(group(logprobs=asks), 0, (1,)) for asks in (True, False))
    for sequence in (asked, plain):
        sequence.logprobs += b"abcd"
    assert (asked.take_logprobs(), asked.take_logprobs(), plain.take_logprobs()) == (b"abcd", b"", None)


def test_a_higher_class_is_before_an_earlier_arrival() -> None:
    made = [SequenceGroup(str(i), (1,), SamplingParams(1), i, priority) for i, priority in enumerate((2, 1, 0, 1))]
    assert [one.request_id for one in sorted(made, key=lambda one: one.order)] == ["2", "1", "3", "0"]
