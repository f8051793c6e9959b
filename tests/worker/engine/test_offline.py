"""The engine without a queue: outputs by prompt and choice."""

from __future__ import annotations

import pytest

from quire.shared.messages import SamplingParams
from quire.worker.engine.offline import complete, generate
from tests.support.mock_model import continuation, make_engine

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
