"""The pacer finds how many tokens of batches a step may compute next to calls of higher classes. No real time."""

from __future__ import annotations

import pytest

from quire.shared.messages import GenerationRequest, StepItem
from quire.worker.engine.batch_pacing import RECENT_S, BatchPacer
from quire.worker.engine.engine import Engine
from tests.support.mock_model import alone, assert_idle, final, make_engine, request, run, steps

BATCH, STANDARD = 2, 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def learn(pacer: BatchPacer, base_s: float, token_s: float, steps: int = 600) -> int:
    """Serve steps of a machine that takes `base_s` and `token_s` per token. Returns the bound that is learnt."""
    for _ in range(steps):
        pacer.observe(pacer.tokens, base_s + token_s * pacer.tokens)
    return pacer.tokens


def test_steps_are_bounded_only_for_a_while_after_a_call() -> None:
    clock = Clock()
    pacer = BatchPacer(0.005, 256, clock)
    assert pacer.allowance is None
    pacer.note_call()
    assert pacer.allowance == 1
    clock.now += RECENT_S - 0.1
    assert pacer.allowance == 1
    clock.now += 0.2
    assert pacer.allowance is None


def test_it_learns_anew_after_a_while_without_calls() -> None:
    clock = Clock()
    pacer = BatchPacer(0.005, 256, clock)
    pacer.note_call()
    learnt = learn(pacer, 0.001, 0.0001)
    clock.now += RECENT_S - 1
    pacer.note_call()
    assert pacer.allowance == learnt
    clock.now += RECENT_S + 1
    pacer.note_call()
    assert pacer.allowance == 1


@pytest.mark.parametrize(("base_s", "token_s"), [(0.001, 0.0001), (0.002, 0.0005), (0.0, 0.001)])
def test_it_finds_the_number_of_tokens_that_meets_the_target(base_s: float, token_s: float) -> None:
    tokens = learn(BatchPacer(0.005, 256), base_s, token_s)
    assert 0.8 * 0.005 <= base_s + token_s * tokens <= 0.005


def test_where_each_step_takes_longer_than_the_target_it_adds_a_quarter_at_most() -> None:
    """As on a GPU with a large model: a step takes 20 ms with any number of sequences."""
    assert learn(BatchPacer(0.005, 256), 0.020, 0.000001) == 256
    assert 18 <= learn(BatchPacer(0.005, 256), 0.020, 0.0002) <= 30


def test_it_follows_a_machine_that_becomes_slower() -> None:
    pacer = BatchPacer(0.005, 256)
    assert learn(pacer, 0.001, 0.0001) > 30
    assert learn(pacer, 0.001, 0.001) <= 5


def test_one_token_is_the_least() -> None:
    assert learn(BatchPacer(0.001, 256), 0.0, 0.050) == 1


def test_steps_far_from_the_bound_and_single_slow_steps_change_nothing() -> None:
    pacer = BatchPacer(0.005, 256)
    tokens = learn(pacer, 0.001, 0.0001)
    for _ in range(100):
        pacer.observe(1, 0.001)
    assert pacer.tokens == tokens
    for number in range(60):
        pacer.observe(tokens, 0.5 if number % 5 == 0 else 0.0049)
    assert pacer.tokens == tokens


@pytest.mark.parametrize("wrong", [(0.0, 1), (0.01, 0)])
def test_parameters_must_be_above_zero(wrong: tuple[float, int]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        BatchPacer(*wrong)


# --- in an engine -----------------------------------------------------------------------------------------------------


def rows(engine: Engine, items: list[StepItem]) -> tuple[int, int]:
    """Run a step. Returns its tokens of the class `batch`, and those of higher classes."""
    found: list[tuple[int, int]] = []

    def count(step) -> None:  # type: ignore[no-untyped-def]
        groups = [(one.group, 1) for one in step.decodes.sequences]
        groups += [(chunk.sequence.group, chunk.num_tokens) for chunk in step.chunks]
        lowest = sum(tokens for group, tokens in groups if group.priority == BATCH)
        found.append((lowest, sum(tokens for _, tokens in groups) - lowest))

    engine.observer = count
    items += engine.step()
    engine.observer = None
    return found[0]


def filled_engine(clock: Clock) -> tuple[Engine, BatchPacer, list[StepItem]]:
    """Return an engine in which twelve lines of batches decode, its pacer, and the results until now."""
    engine = make_engine(max_num_seqs=16, max_num_batched_tokens=64, num_blocks=200)
    engine.batch_pacer = BatchPacer(0.005, 256, clock)
    for number in range(12):
        engine.add(line(number), priority=BATCH)
    return engine, engine.batch_pacer, steps(engine, 3)


def line(number: int) -> GenerationRequest:
    return request(f"line{number}", (1, 2, 3 + number % 4), max_tokens=12, ignore_eos=True)


def call(number: int = 0, max_tokens: int = 3) -> GenerationRequest:
    return request(f"call{number}", (4, 5), max_tokens=max_tokens, ignore_eos=True)


def test_lines_wait_while_calls_arrive_and_all_continue_afterwards() -> None:
    clock = Clock()
    engine, pacer, items = filled_engine(clock)
    assert rows(engine, items) == (12, 0)
    engine.add(call(), priority=STANDARD)
    pacer.tokens = 4
    assert rows(engine, items) == (0, 2), "the prompt of the call alone"
    assert [rows(engine, items) for _ in range(3)] == [(4, 1), (4, 1), (4, 0)]
    engine.add(request("late", (1, 2, 3, 4, 5, 6), max_tokens=2, ignore_eos=True), priority=BATCH)
    assert rows(engine, items) == (4, 0), "no line is admitted while others wait"
    clock.now += RECENT_S + 1
    assert rows(engine, items) == (12 + 6, 0)
    items += run(engine)
    assert_idle(engine)
    for number in range(12):
        assert final(items, f"line{number}") == alone(line(number))


def test_the_oldest_lines_end_while_calls_arrive_all_the_time() -> None:
    clock = Clock()
    engine, _, items = filled_engine(clock)
    for number in range(120):
        engine.add(call(number, max_tokens=1), priority=STANDARD)
        items += steps(engine, 2)
        clock.now += 1.0
    ended = [item.request_id for item in items if item.outcome and item.request_id.startswith("line")]
    assert sorted(ended) == sorted(f"line{number}" for number in range(12))
    assert ended[:4] == [f"line{number}" for number in range(4)]


def test_prompts_of_lines_are_computed_in_chunks_within_the_bound() -> None:
    engine = make_engine(max_num_seqs=16)
    engine.batch_pacer = BatchPacer(0.005, 256, Clock())
    engine.add(call(max_tokens=8), priority=STANDARD)
    items = steps(engine, 1)
    engine.batch_pacer.tokens = 4
    prompt = request("line", range(1, 12), max_tokens=4, ignore_eos=True)
    engine.add(prompt, priority=BATCH)
    assert [rows(engine, items) for _ in range(3)] == [(4, 1), (4, 1), (3, 1)]
    items += run(engine)
    assert final(items, "line") == alone(prompt)


def test_a_line_of_several_sequences_decodes_with_all_of_them() -> None:
    engine = make_engine(max_num_seqs=16)
    engine.batch_pacer = BatchPacer(0.005, 256, Clock())
    items: list[StepItem] = []
    for number in range(2):
        engine.add(request(f"line{number}", (1, 2), n=3, max_tokens=12, ignore_eos=True), priority=BATCH)
    items += steps(engine, 3)
    engine.add(call(max_tokens=1), priority=STANDARD)
    items += steps(engine, 1)
    assert rows(engine, items) == (3, 0)
    items += run(engine)
    assert_idle(engine)


def test_without_a_pacer_nothing_is_bounded() -> None:
    engine, _, items = filled_engine(Clock())
    engine.batch_pacer = None
    engine.add(call(), priority=STANDARD)
    items += steps(engine, 1)
    assert rows(engine, items) == (12, 1)
