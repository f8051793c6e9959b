"""The engine over a mock model: every sequence gets exactly its own tokens in any batch."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from quire.shared.protocol.messages import Delta, Outcome, SamplingParams, StepItem
from quire.worker.engine.blocks import BlockError
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.offline import complete, generate
from quire.worker.engine.randomness import uniform
from quire.worker.engine.seen_tokens import SeenTokens
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.stop_strings import StopStringMatcher
from tests.support.mock_model import EOS, Letters, continuation, final, make_engine, request, run, text
from tests.support.tokenizers import byte_fallback, byte_level


def test_computed_tokens_are_counted_as_those_of_prompts_and_of_decodes() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(request("a", range(1, 13), max_tokens=5, ignore_eos=True))
    run(engine)
    # Two chunks, of which the second one gives the first token.
    assert (engine.num_steps, engine.num_prefill_tokens, engine.num_decode_tokens) == (6, 12, 4)
    assert engine.num_interrupted_steps == 0


def test_running_streams_decode_in_every_step_while_a_long_prompt_is_computed() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(request("stream", (1, 2), max_tokens=12, ignore_eos=True))
    engine.step()
    engine.add(request("long", tuple(range(1, 61))))
    for _ in range(8):
        assert "stream" in [item.request_id for item in engine.step()]


def test_every_choice_of_a_request_is_drawn_by_its_own_random_numbers() -> None:
    engine = make_engine()
    engine.add(request("n", (9, 8), n=3, temperature=1.0, seed=42, ignore_eos=True))
    items = run(engine)
    texts = {tuple(text(items, "n", choice)) for choice in range(3)}
    assert len(texts) == 3
    assert next(item.outcome for item in items if item.outcome).name == "length"


def test_a_request_that_can_never_fit_is_refused_alone() -> None:
    engine = make_engine(num_blocks=4)
    engine.add(request("good", (1, 2)))
    with pytest.raises(RequestRefused, match="context of 128 tokens"):
        engine.add(request("long", (1,) * 200))
    with pytest.raises(RequestRefused, match="9 KV blocks and the cache has 4"):
        engine.add(request("wide", (1,) * 28))
    assert text(run(engine), "good") == continuation((1, 2), 8)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_sequence_at_the_token_that_completes_it(include: bool) -> None:
    whole = continuation((5, 5), 30)
    letters = Letters().decode(whole)
    stop = letters[3:6]
    engine = make_engine()
    params: dict[str, Any] = {"stop": (stop,), "include_stop_str_in_output": include}
    engine.add(request("a", (5, 5), max_tokens=30, ignore_eos=True, **params))
    items = run(engine)
    got = text(items, "a")
    assert Letters().decode(got) == letters[: letters.index(stop) + len(stop)]
    assert items[-1].deltas[-1].finish_reason == "stop"
    assert items[-1].deltas[-1].matched_stop == stop


def test_a_stop_token_ends_the_sequence_even_if_end_tokens_are_ignored() -> None:
    whole = continuation((5, 5), 30)
    token = next(token for token in whole[3:] if token != EOS)
    wanted = whole[: whole.index(token) + 1]
    for name, more in (("alone", {}), ("with others", {"min_tokens": 30, "stop": ("no such text",)})):
        engine = make_engine()
        engine.add(request("a", (5, 5), max_tokens=30, ignore_eos=True, stop_token_ids=(EOS + 1, token), **more))
        engine.add(request("b", (5, 5), max_tokens=30, ignore_eos=True))
        items = run(engine)
        assert text(items, "a") == wanted, name
        last = next(item for item in reversed(items) if item.request_id == "a")
        assert (last.outcome, last.deltas[-1][2:4]) == (Outcome("stop"), ("stop", ""))
        assert text(items, "b") == whole, "it is the other's"


def test_an_end_token_that_is_a_stop_token_too_ends_as_end_tokens_do() -> None:
    prompt = next((i,) for i in range(1, 90) if continuation((i,), 6)[-1] == EOS)
    for ignore_eos, matched in ((False, None), (True, "")):
        engine = make_engine()
        engine.add(request("a", prompt, max_tokens=30, stop_token_ids=(EOS,), ignore_eos=ignore_eos))
        last = run(engine)[-1].deltas[-1]
        assert (last.token_ids, last.finish_reason, last.matched_stop) == ((EOS,), "stop", matched)


def test_the_outcome_names_every_way_in_which_a_text_ends() -> None:
    prompt = next((i,) for i in range(1, 90) if continuation((i,), 6)[-1] == EOS)
    whole = continuation(prompt, 6)
    letters = Letters().decode(whole)
    for params, expected in (
        ({"max_tokens": len(whole)}, "stop"),  # with its last token, and with the end token
        ({"max_tokens": len(whole) - 1}, "length"),
        ({"max_tokens": len(whole) - 1, "stop": ("0",)}, "length"),
        ({"max_tokens": len(whole), "stop": ("0",)}, "stop"),
        ({"max_tokens": len(whole), "ignore_eos": True}, "length"),
        ({"max_tokens": 2, "stop": (letters[1],)}, "stop"),
    ):
        engine = make_engine()
        engine.add(request("a", prompt, **params))
        last = run(engine)[-1]
        assert (last.deltas[-1].finish_reason, last.outcome) == (expected, Outcome(expected))


def test_the_outcome_is_length_if_a_choice_reached_max_tokens_in_any_attempt() -> None:
    prompt = next((i,) for i in range(1, 90) if continuation((i,), 6)[-1] == EOS)
    engine = make_engine()
    earlier = StepItem("a", 0, (Delta(0, (5,) * 6, "length"),))
    engine.add(request("a", prompt, n=2, max_tokens=6), (earlier,))
    last = run(engine)[-1]
    assert [(delta.choice, delta.finish_reason) for delta in last.deltas] == [(1, "stop")]
    assert last.outcome == Outcome("length")


def test_an_engine_without_a_tokenizer_looks_for_no_stop_string() -> None:
    engine = make_engine()
    bare = Engine(engine.runner.model, engine.limits, (EOS,), None)
    bare.add(request("a", (5, 5), stop=(Letters().decode(continuation((5, 5), 1)),)))
    assert text(run(bare), "a") == continuation((5, 5), 8)


@pytest.mark.parametrize("cut", range(3, 6))
def test_a_stop_string_may_begin_in_the_output_of_an_earlier_attempt(cut: int) -> None:
    letters = Letters().decode(continuation((5, 5), 30))
    asked = request("a", (5, 5), max_tokens=30, stop=(letters[2:6],), ignore_eos=True)
    first, second = make_engine(), make_engine()
    first.add(asked)
    earlier = tuple(item for _ in range(cut) for item in first.step())
    second.add(asked, earlier)
    items = [*earlier, *run(second)]
    assert Letters().decode(text(items, "a")) == letters[:6]
    assert items[-1].deltas[-1].matched_stop == letters[2:6]


def test_an_engine_that_checks_itself_finds_a_contradiction() -> None:
    engine = make_engine()
    engine.add(request("a", (1, 2, 3)))
    engine.step()
    engine.scheduler.blocks.ref_counts[-1] += 1
    with pytest.raises(BlockError):
        engine.step()


@pytest.mark.parametrize("prompt", [(), (1, 97), (2**32 - 1,)])
def test_tokens_that_the_model_does_not_have_are_refused_alone(prompt: tuple[int, ...]) -> None:
    engine = make_engine()
    engine.add(request("good", (1, 2)))
    with pytest.raises(RequestRefused):
        engine.add(request("bad", prompt))
    assert text(run(engine), "good") == continuation((1, 2), 8)


# --- results ----------------------------------------------------------------------------------------------------------
# Stop strings in texts with special tokens and leading spaces.


def test_a_stop_string_may_begin_with_the_space_between_the_prompt_and_the_first_word() -> None:
    words = byte_fallback().encode("the way", add_special_tokens=False).ids
    assert StopStringMatcher(byte_fallback(), (" the",)).push(words) == " the"


def test_a_stop_string_may_be_in_a_special_token_if_these_are_text() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("a<|im_end|>b", add_special_tokens=False).ids
    assert StopStringMatcher(tokenizer, ("im_end",)).push(token_ids) is None
    assert StopStringMatcher(tokenizer, ("im_end",), skip_special_tokens=False).push(token_ids) == "im_end"


@pytest.mark.parametrize(("skips", "expected"), [(True, "length"), (False, "stop")])
def test_sequences_are_watched_in_the_text_that_their_request_asks_for(skips: bool, expected: str) -> None:
    end = byte_level().token_to_id("<|im_end|>")
    engine = make_engine(tokenizer=byte_level)
    engine.add(request("a", (1, 2), stop=("_end",), skip_special_tokens=skips, allowed_token_ids=(end,)))
    assert run(engine)[-1].deltas[-1].finish_reason == expected


# --- sequence ---------------------------------------------------------------------------------------------------------
# Counts of tokens, random numbers, limits, and completions without a queue.


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
