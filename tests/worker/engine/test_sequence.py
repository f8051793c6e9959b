"""Counts of tokens, random numbers, limits, and completions without a queue."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.offline import complete, generate
from quire.worker.engine.randomness import uniform
from quire.worker.engine.seen_tokens import SeenTokens
from quire.worker.engine.sequence import Sequence, SequenceGroup
from tests.support.mock_model import continuation, final, make_engine, request, run, text


def group(**params: Any) -> SequenceGroup:
    return SequenceGroup("r", (1, 2, 3), SamplingParams(**({"max_tokens": 4} | params)))


def test_a_request_that_computes_a_pinned_prefix_is_synchronous() -> None:
    made = group()
    made.pin_as = "system"
    made.start()
    assert made.is_synchronous


def counted(seen: SeenTokens) -> dict[int, int]:
    assert len(seen) == len(seen.ids) == len(set(seen.ids.tolist()))
    return dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))


def test_counts_are_those_of_all_tokens_however_many_are_added() -> None:
    draw = random.Random(1)
    seen, expected = SeenTokens((1, 2), (2,)), Counter({1: 0, 2: 1})
    for _ in range(500):
        token = draw.randrange(200)
        seen.add(token)
        expected[token] += 1
        assert counted(seen) == expected


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
