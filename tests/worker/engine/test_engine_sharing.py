"""Blocks that sequences share: the prompt of several choices, the context of beams, cached and pinned prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.shared.protocol.messages import SamplingParams, StepItem
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.beams import BeamSearch
from quire.worker.engine.limits import RequestRefused
from quire.worker.pinned_prefixes import pin
from tests.support.mock_model import alone, continuation, final, make_engine, request, run, steps, text
from tests.worker.engine.test_scheduler import swapped_engine

BLOCK = 4


def prompt_of(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + 5 * i) % 96 + 1 for i in range(length))


def texts(items: list[StepItem], name: str) -> list[list[int]]:
    return [list(delta.token_ids) for delta in final(items, name)]


def computed(engine: Engine) -> int:
    return engine.runner.model.num_computed  # type: ignore[no-any-return]


def written(engine: Engine) -> int:
    return engine.runner.model.num_written  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 10])
@pytest.mark.parametrize("n", [2, 4])
def test_choices_are_computed_with_one_prefill_and_copy_at_most_one_block_for_each_but_the_last(
    length: int, n: int
) -> None:
    engine = make_engine()
    prompt = prompt_of(length)
    engine.add(request("a", prompt, n=n, ignore_eos=True))
    engine.step()
    assert computed(engine) == length
    leader, *others = engine.requests["a"].sequences
    assert all(one.block_table == leader.block_table for one in others)
    engine.step()
    full, tails = length // BLOCK, {one.block_table[length // BLOCK] for one in (leader, *others)}
    assert all(one.block_table[:full] == leader.block_table[:full] for one in others), "full blocks are shared"
    assert len(tails) == n, "each writes into its own"
    assert engine.scheduler.blocks.counters.copies == (n - 1 if length % BLOCK else 0), "the last writes in place"
    run(engine)
    assert computed(engine) == length + 7 * n


@pytest.mark.parametrize("width", [2, 3, 4])
def test_beams_copy_at_most_one_block_each_in_a_step(width: int) -> None:
    engine = make_engine(branches=True)
    counters = engine.scheduler.blocks.counters
    asked = request("a", prompt_of(6), beam_width=width, n=width, max_tokens=20, ignore_eos=True)
    engine.add(asked)
    items: list[StepItem] = []
    branched = 0
    while engine.has_work:
        copies, forks = counters.copies, counters.forks
        items += engine.step()
        assert counters.copies - copies <= width
        branched += counters.forks > forks
    assert branched > 3, "the beams did branch"
    assert [one.token_ids for one in final(items, "a")] == [one.token_ids for one in alone(asked, branches=True)]


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9, 11, 12, 13])
def test_a_full_hit_computes_one_token_and_writes_nothing(length: int) -> None:
    engine = make_engine(prefix_caching=True)
    prompt = prompt_of(length)
    pin(engine, "all", prompt)
    before = computed(engine), written(engine)
    engine.add(request("a", prompt))
    items = engine.step()
    assert (computed(engine) - before[0], written(engine) - before[1]) == (1, 0)
    assert text([*items, *run(engine)], "a") == continuation(prompt, 8)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_a_repeated_prompt_is_computed_from_its_last_full_block_on(length: int) -> None:
    engine = make_engine(prefix_caching=True)
    prompt = prompt_of(length)
    engine.add(request("a", prompt, max_tokens=1))
    run(engine)
    before = computed(engine), written(engine)
    engine.add(request("b", prompt))
    items = steps(engine, 1)
    fresh = length % BLOCK
    assert (computed(engine) - before[0], written(engine) - before[1]) == (max(1, fresh), fresh)
    assert text([*items, *run(engine)], "b") == continuation(prompt, 8)


def test_a_hit_at_every_length_leaves_the_text_unchanged() -> None:
    engine = make_engine(prefix_caching=True)
    whole = prompt_of(24)
    engine.add(request("whole", whole))
    run(engine)
    for cut in range(1, 25):
        for last in (whole[cut - 1], 96):
            prompt = (*whole[: cut - 1], last)
            engine.add(request("cut", prompt, n=2))
            assert texts(run(engine), "cut") == [continuation(prompt, 8)] * 2
    assert engine.scheduler.blocks.counters.prefix_hits > 24


def test_a_conversation_finds_its_own_answer_in_the_cache() -> None:
    engine = make_engine(prefix_caching=True)
    prompt = prompt_of(10)
    engine.add(request("a", prompt, ignore_eos=True, max_tokens=10))
    answer = text(run(engine), "a")
    before = computed(engine)
    longer = (*prompt, *answer, 9)
    engine.add(request("b", longer, max_tokens=1))
    assert text(run(engine), "b") == continuation(longer, 1)
    assert computed(engine) - before == 21 - 16, "all full blocks of the past are found"


def test_different_salts_share_nothing() -> None:
    engine = make_engine(prefix_caching=True)
    prompt = prompt_of(16)
    for salt, fresh in (("", 16), ("x", 16), ("y", 16), ("x", 1), ("", 1)):
        before = computed(engine)
        engine.add(request("a", prompt, salt, max_tokens=1))
        assert text(run(engine), "a") == continuation(prompt, 1)
        assert computed(engine) - before == fresh


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_pinned_prefix_is_found_after_a_flood_and_its_last_block_is_copied_on_write(prefix_caching: bool) -> None:
    engine = make_engine(prefix_caching=prefix_caching, num_blocks=16)
    system = prompt_of(10)
    pin(engine, "system", system)
    pinned = engine.scheduler.blocks.pinned[0].blocks
    for i in range(12):
        engine.add(request(f"flood-{i}", prompt_of(30, first=i + 2)))
    run(engine)
    before, copies = computed(engine), engine.scheduler.blocks.counters.copies
    prompt = (*system, 50, 51)
    engine.add(request("a", prompt, n=2))
    items = steps(engine, 1)
    assert computed(engine) - before == 2
    assert engine.requests["a"].sequences[0].block_table[:2] == pinned[:2]
    assert engine.requests["a"].sequences[0].block_table[2] != pinned[2]
    assert engine.scheduler.blocks.counters.copies - copies == 1
    assert texts([*items, *run(engine)], "a") == [continuation(prompt, 8)] * 2
    engine.add(request("other salt", prompt, "salt"))
    before = computed(engine)
    engine.step()
    assert computed(engine) - before == 12, "a pinned prefix is of its own salt"
    run(engine)


def test_a_pinned_prefix_that_can_never_fit_is_refused_by_name() -> None:
    engine = make_engine(num_blocks=6)
    with pytest.raises(RequestRefused, match=r"pinned prefix 'big': 25 tokens need 7 KV blocks and the cache has 6"):
        pin(engine, "big", prompt_of(24))
    with pytest.raises(RequestRefused, match=r"pinned prefix 'long': 200 prompt tokens .* context of 128 tokens"):
        pin(engine, "long", prompt_of(200))
    assert engine.scheduler.blocks.pinned == []
    run(engine)


def test_a_group_that_fits_only_on_its_pinned_prefix_runs_to_its_end() -> None:
    """The group still shares the pinned blocks after being swapped out and in: a copy of them would not fit."""
    for preemption in ("swap", "recompute"):
        engine = make_engine(num_blocks=12, num_host_blocks=24, preemption=preemption, max_num_batched_tokens=32)
        system = prompt_of(16)
        pin(engine, "system", system)
        for i in range(2):
            engine.add(request(f"r{i}", (*system, 90 + i), n=2, max_tokens=15, ignore_eos=True))
        items = run(engine)
        assert engine.groups.num_preemptions > 0
        for i in range(2):
            assert texts(items, f"r{i}") == [continuation((*system, 90 + i), 15, ignore_eos=True)] * 2


def test_best_of_scores_are_mean_log_probabilities_under_the_model() -> None:
    import numpy as np

    from tests.support.mock_model import START, MockModel, advance, log_softmax

    engine = make_engine(branches=True)
    engine.add(request("a", (3, 4), n=3, best_of=4, temperature=1.0, seed=2, repetition_penalty=1.2, stop=("q",)))
    model = MockModel(branches=True)
    for one in final(run(engine), "a"):
        state, logprobs = START, []
        for at, token in enumerate((3, 4, *one.token_ids)):
            if at >= 2:
                logprobs.append(log_softmax(model.logits_of([state]))[0, token])
            state = advance(state, token)
        assert one.score == pytest.approx(float(np.mean(logprobs)), abs=1e-5)


@pytest.mark.parametrize("ranking", [{"best_of": 4, "temperature": 1.0, "seed": 3}, {"beam_width": 4, "n": 2}])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_all_tokens_of_a_ranked_request_are_counted_as_they_are_computed(
    ranking: dict[str, Any], preemption: str
) -> None:
    engine = make_engine(branches=True, num_blocks=10, num_host_blocks=24, preemption=preemption)
    engine.add(request("streamed", (3, 4), n=2, max_tokens=12, ignore_eos=True))
    engine.add(request("ranked", (5, 6), max_tokens=6, ignore_eos=True, **ranking))
    counts, items = [], []
    while engine.has_work:
        items += engine.step()
        counts += engine.take_computed()
    assert {name for name, _ in counts} == {"ranked"}
    assert [count for _, count in counts] == sorted(count for _, count in counts)
    assert counts[-1] == ("ranked", 4 * 6)
    assert any(0 < count < 4 * 6 for _, count in counts)
    assert sum(len(one.token_ids) for one in final(items, "ranked")) == ranking.get("n", 1) * 6
    assert engine.groups.num_preemptions > 0
    # A request that ends early is counted once more.
    engine.add(request("left", (7, 8), max_tokens=6, ignore_eos=True, **ranking))
    for _ in range(3):
        engine.step()
    assert engine.take_computed() == [("left", 4 * 3)]
    engine.finish("left", "cancelled")
    assert engine.take_computed() == [("left", 4 * 3)]
    assert engine.take_computed() == []


# --- groups -----------------------------------------------------------------------------------------------------------
# Rows that are free or preemptible, and the end of a beam search.


def test_rows_are_free_unless_a_waiting_group_will_take_them_and_none_is_while_blocks_are_short() -> None:
    engine = make_engine(num_blocks=20, max_num_batched_tokens=80)
    engine.add(request("long", (1,) * 72, max_tokens=4))
    free = [engine.groups.num_free_rows()]
    for name in ("a", "b"):
        engine.add(request(name, (2, 3), max_tokens=2))
        free.append(engine.groups.num_free_rows())
    assert free == [7, 6, 0], "the waiting groups will take all blocks"
    run(engine)
    assert engine.groups.num_free_rows() == 8
    assert swapped_engine().groups.num_free_rows() == 0, "the swapped group will take the free blocks"


def test_preemptible_rows_are_those_of_lower_classes_that_no_waiting_group_will_take() -> None:
    engine = make_engine(max_num_seqs=4)
    engine.add(request("low", (1, 2), n=3), priority=2)
    engine.step()
    engine.add(request("also low", (1, 2), n=2), priority=2)
    assert [engine.groups.num_preemptible_rows(priority) for priority in range(3)] == [3, 3, 0]
    engine.add(request("standard", (1, 2), n=2), priority=1)
    assert [engine.groups.num_preemptible_rows(priority) for priority in range(3)] == [3, 1, 0]
    engine.add(request("urgent", (1, 2), n=2), priority=0)
    assert [engine.groups.num_preemptible_rows(priority) for priority in range(3)] == [1, 0, 0]
    run(engine)


END = 0


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "best", "goes_on"),
    [
        ("false", 1.0, -1.9, True),  # -0.95 a token is better than the worst that ended, -1.0
        ("false", 1.0, -2.0, False),  # as good is not better
        ("never", 1.0, -2.2, True),  # better still, were it drawn out to ten tokens
        ("never", 0.5, -2.2, True),
        ("true", 1.0, -1.9, False),
        ("never", -1.0, -1.7, True),  # that would only make it worse here
    ],
)
def test_a_full_search_continues_while_a_better_beam_is_possible(
    early_stopping: str, length_penalty: float, best: float, goes_on: bool
) -> None:
    params = SamplingParams(
        10, n=2, temperature=0.0, beam_width=2, length_penalty=length_penalty, early_stopping=early_stopping
    )
    search = BeamSearch(params, frozenset([END]))
    first = search.advance(np.float32([[-1.0, -1.25, -1.5, -9]]), np.int32([[END, 5, 6, 7]]), [()])
    assert first == [(0, 5), (0, 6)]
    logprobs, token_ids = np.float32([[-0.6, best + 1.25, -9, -9]] * 2), np.int32([[END, 5, 6, 7]] * 2)
    logprobs[1] = -9
    found = search.advance(logprobs, token_ids, [(5,), (6,)])
    assert {one.token_ids for one in search.ended} == {(END,), (5, END)}
    assert search.ended[0].score > search.ended[1].score
    assert (found is not None) == goes_on


def test_all_beams_continue_even_if_every_end_token_of_each_is_likelier() -> None:
    search = BeamSearch(SamplingParams(10, temperature=0.0, beam_width=2, early_stopping="never"), frozenset([0, 1, 2]))
    count = search.num_candidates
    logprobs, token_ids = -np.arange(1, count + 1, dtype=np.float32)[None], np.arange(count, dtype=np.int32)[None]
    assert search.advance(logprobs, token_ids + 3, [()]) == [(0, 3), (0, 4)]
    logprobs[:, 3:] -= 9
    assert search.advance(logprobs.repeat(2, 0), token_ids.repeat(2, 0), [(3,), (4,)]) == [(0, 3), (0, 4)]
    assert [one.token_ids for one in search.ended] == [(3, 0), (3, 1)], "what ends below the first places is left out"
