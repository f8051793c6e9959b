"""The engine over a mock model: every sequence gets exactly its own tokens in any batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.shared.protocol.messages import Delta, Outcome, StepItem
from quire.worker.engine.blocks import BlockError
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import RequestRefused
from tests.support.mock_model import EOS, Letters, continuation, make_engine, request, run, text


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


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 30), st.integers(1, 3)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(
    ACTIONS,
    st.integers(18, 60),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 6),
    st.integers(0, 20),
)
@pytest.mark.slow
def test_random_arrivals_lengths_cancels_and_shortages_leak_nothing_and_starve_no_request(
    actions: list[tuple], num_blocks: int, block_size: int, max_num_seqs: int, extra_budget: int
) -> None:
    engine = make_engine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_budget,
        max_model_len=70,
    )
    expected: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    items: list[StepItem] = []

    def step() -> None:
        oldest = min(
            (s.group.arrival, s.choice, len(s.token_ids) - s.num_computed)
            for g in engine.requests.values()
            for s in g.unfinished
        )
        items.extend(engine.step())
        engine.check_integrity()
        # The oldest sequence is never passed over: it has fewer tokens to compute, or it has drawn one, or it has
        # ended.
        for group in engine.requests.values():
            for sequence in group.unfinished:
                if (group.arrival, sequence.choice) == oldest[:2]:
                    assert sequence.num_computed > 0

    for action in actions:
        if action[0] == "add":
            _, length, max_tokens, n = action
            name = f"r{len(expected)}"
            prompt = tuple((len(expected) * 7 + i) % 96 + 1 for i in range(length))
            try:
                engine.add(request(name, prompt, max_tokens=max_tokens, n=n))
            except RequestRefused:
                continue
            expected[name] = continuation(prompt, max_tokens)
        elif action[0] == "cancel" and engine.requests:
            name = sorted(engine.requests)[action[1] % len(engine.requests)]
            item = engine.finish(name, "cancelled")
            assert item is not None
            items.append(item)
            cancelled.add(name)
        elif action[0] == "step":
            for _ in range(action[1]):
                if engine.has_work:
                    step()
        engine.check_integrity()
    for _ in range(20_000):
        if not engine.has_work:
            break
        step()
    assert not engine.has_work
    assert engine.scheduler.blocks.num_free == num_blocks
    for name, tokens in expected.items():
        if name in cancelled:
            assert text(items, name) == tokens[: len(text(items, name))]
        else:
            n = 1 + max(d.choice for i in items if i.request_id == name for d in i.deltas)
            assert all(text(items, name, choice) == tokens for choice in range(n))


@pytest.mark.parametrize("prompt", [(), (1, 97), (2**32 - 1,)])
def test_tokens_that_the_model_does_not_have_are_refused_alone(prompt: tuple[int, ...]) -> None:
    engine = make_engine()
    engine.add(request("good", (1, 2)))
    with pytest.raises(RequestRefused):
        engine.add(request("bad", prompt))
    assert text(run(engine), "good") == continuation((1, 2), 8)
