"""Sequences, steps and limits."""

from __future__ import annotations

import random
from collections import Counter
from itertools import repeat
from typing import Any

import numpy as np
import pytest
from scipy import stats

from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.offline import complete, generate
from quire.worker.engine.randomness import uniform
from quire.worker.engine.seen_tokens import SeenTokens
from quire.worker.engine.sequence import PENDING, Sequence, SequenceGroup
from quire.worker.engine.step import DecodeBatch, PrefillChunk, Step
from tests.support.mock_model import continuation, final, make_engine, request, run, text


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


def test_a_request_that_computes_a_pinned_prefix_is_synchronous() -> None:
    made = group()
    made.pin_as = "system"
    made.start()
    assert made.is_synchronous


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


def counted(seen: SeenTokens) -> dict[int, int]:
    assert len(seen) == len(seen.ids) == len(set(seen.ids.tolist()))
    return dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))


def test_tokens_of_the_prompt_count_only_what_was_generated() -> None:
    seen = SeenTokens((4, 4, 6), (9, 2, 9, 6))
    assert counted(seen) == {4: 0, 6: 1, 9: 2, 2: 1}
    assert counted(SeenTokens((), ())) == {}


def test_counts_are_those_of_all_tokens_however_many_are_added() -> None:
    draw = random.Random(1)
    seen, expected = SeenTokens((1, 2), (2,)), Counter({1: 0, 2: 1})
    for _ in range(500):
        token = draw.randrange(200)
        seen.add(token)
        expected[token] += 1
        assert counted(seen) == expected


def test_a_copy_counts_on_its_own() -> None:
    seen = SeenTokens((1,), (2,))
    copied = seen.copy()
    copied.add(2)
    copied.add(3)
    seen.add(1)
    assert counted(seen) == {1: 1, 2: 1}
    assert counted(copied) == {1: 0, 2: 2, 3: 1}


# A stream that moves to a worker of another version must draw on in the same way.
FROZEN = (0.13870941014555427, 0.9880658192551784)


def test_random_numbers_depend_on_seed_choice_and_position_and_on_nothing_else() -> None:
    keys = [(s, c, p) for s in range(20) for c in range(10) for p in range(20)]
    numbers = uniform(*np.array(keys, dtype=np.uint64).T)
    assert len(set(numbers.tolist())) == len(numbers)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 1e-4
    shuffled = np.random.default_rng(0).permutation(len(keys))
    assert (uniform(*np.array(keys, dtype=np.uint64)[shuffled].T) == numbers[shuffled]).all()
    ends = np.array([(0, 0, 0), (2**64 - 1, 3, 1000)], dtype=np.uint64)
    assert tuple(uniform(*ends.T).tolist()) == FROZEN


@pytest.mark.parametrize("params", [{"n": 9}, {"best_of": 9, "temperature": 1.0}, {"beam_width": 9}])
def test_more_sequences_than_there_are_rows_are_refused_alone(params: dict[str, Any]) -> None:
    engine = make_engine()
    engine.add(request("good", (1, 2)))
    with pytest.raises(RequestRefused, match=r"9 sequences at once are more than the 8 that run here"):
        engine.add(request("wide", (1, 2), **params))
    assert text(run(engine), "good") == continuation((1, 2), 8)


def test_a_request_that_can_never_fit_with_all_its_sequences_is_refused_alone() -> None:
    engine = make_engine(num_blocks=13)
    engine.add(request("three", (1,) * 6, n=3, max_tokens=10))
    with pytest.raises(RequestRefused, match=r"16 tokens in 5 sequences need 16 KV blocks and the cache has 13"):
        engine.add(request("five", (1,) * 6, n=5, max_tokens=10))
    assert [list(one.token_ids) for one in final(run(engine), "three")] == [continuation((1,) * 6, 10)] * 3


GREEDY = SamplingParams(6, temperature=0.0)


def test_outputs_are_in_the_order_of_the_prompts() -> None:
    prompts = [(i + 1, 2, 3) for i in range(12)]
    outputs = generate(make_engine(), prompts, GREEDY)
    assert outputs == [[continuation(prompt, 6)] for prompt in prompts]


def test_each_prompt_may_have_its_own_parameters() -> None:
    long = SamplingParams(9, temperature=0.0, n=2, ignore_eos=True)
    short, both = generate(make_engine(), [(1, 2), (1, 2)], [GREEDY, long])
    assert short == [continuation((1, 2), 6)]
    assert both == [continuation((1, 2), 9, ignore_eos=True)] * 2
    with pytest.raises(ValueError, match="zip"):
        generate(make_engine(), [(1, 2)], [GREEDY, long])


def test_a_completion_says_how_it_ended_and_how_probable_it_was() -> None:
    params = SamplingParams(4, temperature=1.0, seed=1, best_of=3, n=2, logprobs=True, ignore_eos=True)
    [[best, second]] = complete(make_engine(branches=True), [(5, 6)], params)
    assert best.finish_reason == second.finish_reason == "length"
    assert best.score is not None
    assert second.score is not None
    assert best.score >= second.score
    assert best.score == pytest.approx(sum(one.logprob for one in best.logprobs) / 4, abs=1e-5)
    [[plain]] = complete(make_engine(), [(5, 6)], GREEDY)
    assert (plain.score, plain.logprobs) == (None, [])


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
