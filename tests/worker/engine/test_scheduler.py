"""The scheduler runs, preempts and resumes groups by priority, arrival order and prompt budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels import StepInterrupted
from quire.shared.protocol.messages import StepItem
from quire.worker.engine.engine import Engine
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.paged_model import KVCache
from quire.worker.engine.scheduler import MAX_LEFT_OUT
from quire.worker.engine.sequence import GroupState
from tests.support.mock_model import (
    MockModel,
    alone,
    assert_idle,
    continuation,
    final,
    make_engine,
    request,
    run,
    steps,
    text,
)


def states(engine: Engine) -> dict[str, GroupState]:
    return {name: group.state for name, group in engine.requests.items()}


def ended(items: list[StepItem]) -> list[str]:
    return [item.request_id for item in items if item.outcome]


METHODS: dict[str, dict[str, Any]] = {
    "one": {},
    "n": {"n": 3, "temperature": 1.0, "seed": 3},
    "best_of": {"n": 2, "best_of": 3, "temperature": 1.0, "seed": 3},
    "beams": {"n": 3, "beam_width": 3},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("preemption", "num_host_blocks"), [("swap", 60), ("recompute", 0), ("swap", 2)])
def test_forced_preemption_leaves_every_text_unchanged(method: str, preemption: str, num_host_blocks: int) -> None:
    asked = [request(f"r{i}", (i + 1, 2, 3, 4, 5), max_tokens=18, ignore_eos=True, **METHODS[method]) for i in range(4)]
    for prefix_caching in (False, True):
        engine = make_engine(
            branches=True,
            num_blocks=20 if method != "one" else 12,
            max_num_seqs=12,
            num_host_blocks=num_host_blocks,
            preemption=preemption,
            prefix_caching=prefix_caching,
        )
        for one in asked:
            engine.add(one)
        items = run(engine)
        counters = engine.groups.counters
        if num_host_blocks > 2:
            assert counters.swapped > 0 == counters.recomputed
        else:
            assert counters.recomputed > 0, "too little host memory falls back to recomputation"
        for one in asked:
            expected = alone(one, branches=True)
            assert [mine.token_ids for mine in final(items, one.id)] == [theirs.token_ids for theirs in expected]


def test_automatic_preemption_swaps_groups_and_recomputes_single_sequences() -> None:
    for n, swapped in ((1, False), (3, True)):
        engine = make_engine(num_blocks=9 if n == 1 else 16, max_num_seqs=9, num_host_blocks=40)
        for i in range(3):
            engine.add(request(f"r{i}", (i + 1, 2, 3), n=n, max_tokens=14, ignore_eos=True))
        run(engine)
        counters = engine.groups.counters
        assert (counters.swapped > 0, counters.recomputed > 0) == (swapped, not swapped)


@pytest.mark.parametrize("n", [1, 2])
def test_the_first_class_preempts_the_newest_of_the_lowest_class_if_rows_are_short(n: int) -> None:
    engine = make_engine(max_num_seqs=4, num_host_blocks=64)
    for name, priority in (("old", 2), ("middle", 1), ("new", 2)):
        engine.add(request(name, (1, 2, 3), ignore_eos=True, max_tokens=20), priority=priority)
    steps(engine, 3)
    engine.add(request("urgent", (4, 5), n=1 + n, ignore_eos=True), priority=0)
    items = engine.step()
    assert "urgent" in {item.request_id for item in items}
    gone = {name for name, state in states(engine).items() if state is not GroupState.RUNNING}
    assert gone == ({"new"} if n == 1 else {"new", "old"})
    items = run(engine)
    assert engine.groups.counters.for_higher_class == n
    assert ended(items)[0] == "urgent"


def test_the_first_class_preempts_a_lower_one_if_blocks_are_short() -> None:
    engine = make_engine(num_blocks=16)
    engine.add(request("a", (1,) * 20, max_tokens=12, ignore_eos=True), priority=1)
    engine.add(request("b", (2,) * 20, max_tokens=12, ignore_eos=True), priority=1)
    items = steps(engine, 5)
    engine.add(request("urgent", (3,) * 20, max_tokens=4, ignore_eos=True), priority=0)
    items += steps(engine, 2)
    assert states(engine)["b"] is GroupState.WAITING
    assert states(engine)["a"] is states(engine)["urgent"] is GroupState.RUNNING
    items += run(engine)
    assert ended(items)[0] == "urgent"
    assert text(items, "b") == continuation((2,) * 20, 12, ignore_eos=True)


def test_no_group_preempts_its_own_class_or_a_higher_one() -> None:
    engine = make_engine(max_num_seqs=2)
    for i, priority in enumerate((0, 1)):
        engine.add(request(f"r{i}", (i + 1, 2), ignore_eos=True), priority=priority)
    engine.step()
    engine.add(request("same", (5, 6)), priority=1)
    assert ended(run(engine))[:2] == ["r0", "r1"]
    assert engine.groups.counters.for_higher_class == 0


def test_no_group_is_preempted_if_that_would_not_help() -> None:
    engine = make_engine(num_blocks=16)
    engine.add(request("first", (1,) * 36, max_tokens=12, ignore_eos=True), priority=0)
    engine.add(request("low", (2,) * 8, max_tokens=10, ignore_eos=True), priority=2)
    steps(engine, 4)
    engine.add(request("urgent", (3,) * 40, max_tokens=4, ignore_eos=True), priority=0)
    engine.step()
    assert states(engine)["low"] is GroupState.RUNNING
    items = run(engine)
    assert engine.groups.counters.for_higher_class == 0
    assert "urgent" in ended(items)


def test_blocks_that_a_lower_class_shares_with_the_urgent_one_help_only_once() -> None:
    engine = make_engine(num_blocks=16, prefix_caching=True, max_num_batched_tokens=64)
    shared = tuple(range(1, 25))
    engine.add(request("first", (90,) * 16, ignore_eos=True), priority=0)
    engine.add(request("low", (*shared, 30, 31), max_tokens=12, ignore_eos=True), priority=2)
    steps(engine, 2)
    engine.add(request("urgent", (*shared, *range(40, 61)), max_tokens=2), priority=0)
    engine.step()
    assert states(engine)["low"] is GroupState.RUNNING
    run(engine)


def test_within_a_class_the_first_come_is_the_first_served_and_higher_classes_go_first() -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=4)
    for name, priority in (("c", 2), ("b1", 1), ("a1", 0), ("b2", 1), ("a2", 0)):
        engine.add(request(name, (1, 2), max_tokens=2, ignore_eos=True), priority=priority)
    assert ended(run(engine)) == ["a1", "a2", "b1", "b2", "c"]


def test_a_long_prompt_of_a_lower_class_does_not_hold_up_a_higher_one() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(request("long", (1,) * 80), priority=2)
    engine.step()
    engine.add(request("urgent", (2, 3)), priority=0)
    assert [item.request_id for item in engine.step()] == ["urgent"]
    run(engine)


def swapped_engine() -> Engine:
    """Return an engine with two groups; the newer one is swapped out."""
    engine = make_engine(num_blocks=16, num_host_blocks=40, preemption="swap", max_num_batched_tokens=40)
    engine.add(request("old", (1,) * 20, n=2, max_tokens=20, ignore_eos=True))
    engine.add(request("swapped", (2,) * 20, n=2, max_tokens=12, ignore_eos=True))
    while states(engine)["swapped"] is not GroupState.SWAPPED:
        engine.step()
    return engine


@pytest.mark.parametrize("max_tokens", [19, 30])
def test_a_swapped_group_comes_back_before_newer_ones_that_wait(max_tokens: int) -> None:
    engine = swapped_engine()
    engine.add(request("newer", (3,) * 20, max_tokens=max_tokens, ignore_eos=True))
    while states(engine)["swapped"] is GroupState.SWAPPED:
        assert states(engine)["newer"] is GroupState.WAITING
        engine.step()
    run(engine)


def test_a_group_that_did_not_fit_into_host_memory_comes_back_before_a_newer_swapped_one() -> None:
    engine = make_engine(num_blocks=16, num_host_blocks=5, preemption="swap", max_num_batched_tokens=60)
    for i, name in enumerate(("oldest", "elder", "swapped")):
        engine.add(request(name, (i + 1,) * 12, max_tokens=40, ignore_eos=True))
    engine.step()
    while states(engine)["elder"] is GroupState.RUNNING:
        engine.step()
    assert states(engine) == {
        "oldest": GroupState.RUNNING,
        "elder": GroupState.WAITING,
        "swapped": GroupState.SWAPPED,
    }
    engine.add(request("newest", (4, 5), max_tokens=2))
    while states(engine)["elder"] is GroupState.WAITING:
        assert states(engine)["swapped"] is GroupState.SWAPPED
        assert states(engine)["newest"] is GroupState.WAITING
        engine.step()
    run(engine)


def test_short_new_groups_may_pass_a_swapped_one_and_never_starve_it() -> None:
    lone = swapped_engine()
    undisturbed = 0
    while "swapped" in lone.requests:
        lone.step()
        undisturbed += 1
    engine = swapped_engine()
    passed = taken = 0
    while "swapped" in engine.requests:
        taken += 1
        engine.add(request(f"short{taken}", (4, 5), max_tokens=2, ignore_eos=True))
        items = engine.step()
        passed += states(engine).get("swapped") is GroupState.SWAPPED and any("short" in i.request_id for i in items)
    assert passed > 0
    assert taken <= undisturbed + 2
    run(engine)


def test_the_prompt_budget_bounds_steps_with_decodes_and_no_others() -> None:
    engine = make_engine(max_num_batched_tokens=32, max_prefill_tokens=5)
    model = engine.runner.model
    engine.add(request("long", (1,) * 30, ignore_eos=True, max_tokens=30))
    engine.step()
    assert model.num_computed == 30
    engine.add(request("next", (2,) * 18))
    for expected in (5, 5, 5, 3):
        before = model.num_computed
        engine.step()
        assert model.num_computed - before == 1 + expected
    run(engine)


@pytest.mark.parametrize(("stop_after", "finished"), [(1, 0), (3, 0), (4, 1), (7, 2), (9, 2), (10, 3), (11, 3)])
def test_choices_continue_an_earlier_attempt_in_which_some_have_finished(stop_after: int, finished: int) -> None:
    """One choice ends with a stop string, two with the end token, the last with its token number max_tokens."""
    asked = request("a", (3, 1, 4), n=4, temperature=1.0, seed=13, max_tokens=12, stop=("b",))
    whole = alone(asked)
    first = make_engine()
    first.add(asked)
    earlier = tuple(steps(first, stop_after))
    assert sum(delta.finish_reason is not None for item in earlier for delta in item.deltas) == finished
    second = make_engine()
    second.add(asked, earlier)
    assert final([*earlier, *run(second)], "a") == whole


def decoding(engine: Engine, items: list[StepItem]) -> set[str]:
    """Run a step; return the requests that it decodes. Its results are appended to `items`."""
    found: list[set[str]] = []
    engine.observer = lambda step: found.append(set(step.decodes.request_ids))
    items += engine.step()
    engine.observer = None
    return found[0]


def test_a_step_that_computes_a_prompt_of_a_higher_class_leaves_out_the_decodes_of_batches() -> None:
    engine = make_engine(max_num_seqs=8)
    items: list[StepItem] = []
    for name, priority in (("batch", 2), ("standard", 1), ("urgent", 0)):
        engine.add(request(name, (1, 2, 3), max_tokens=20, ignore_eos=True), priority=priority)
        items += steps(engine, 2)
    assert decoding(engine, items) == {"batch", "standard", "urgent"}
    engine.add(request("next", (4, 5), max_tokens=20, ignore_eos=True), priority=0)
    assert decoding(engine, items) == {"standard", "urgent"}
    assert decoding(engine, items) == {"batch", "standard", "urgent", "next"}
    engine.add(request("later", (4, 5), max_tokens=20, ignore_eos=True), priority=2)
    assert decoding(engine, items) == {"batch", "standard", "urgent", "next"}, "prompts of its own class leave it in"
    items += run(engine)
    for name in ("batch", "urgent", "next"):
        one = request(name, (4, 5) if name == "next" else (1, 2, 3), max_tokens=20, ignore_eos=True)
        assert [delta.token_ids for delta in final(items, name)] == [delta.token_ids for delta in alone(one)]


def test_batches_advance_while_prompts_of_higher_classes_come_in_every_step() -> None:
    engine = make_engine(max_num_seqs=8)
    engine.add(request("batch", (1, 2, 3), max_tokens=5, ignore_eos=True), priority=2)
    steps(engine, 1)
    items: list[StepItem] = []
    for number in range(4 * (MAX_LEFT_OUT + 1)):
        engine.add(request(f"r{number}", (4, 5), max_tokens=1, ignore_eos=True), priority=0)
        items += engine.step()
    assert "batch" in ended(items)
    assert_idle(engine)


class Interrupting(MockModel):
    """Ends each step that may be interrupted as soon as its layers begin, if `asks` is set."""

    asks = True

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        if batch.interrupt is not None and self.asks:
            raise StepInterrupted
        return super().forward(batch, kv_cache)


def test_a_step_of_batches_that_is_interrupted_has_no_results_and_is_computed_again() -> None:
    model = Interrupting()
    engine = make_engine(model=model, prefix_caching=True)
    lines = [request(f"line{number}", (1, 2, 3, number), n=2, temperature=1.0, seed=number) for number in range(3)]
    model.asks = False
    for line in lines:
        engine.add(line, priority=2)
    items = steps(engine, 3)
    model.asks = True
    taken = engine.num_steps
    assert steps(engine, 5) == []
    assert (engine.num_steps, engine.num_interrupted_steps) == (taken, 5)
    call = request("call", (1, 2, 3, 4, 5), max_tokens=2)
    engine.add(call, priority=1)
    items += steps(engine, 1)
    assert engine.num_steps == taken + 1, "the step with the prompt of the call is not interrupted"
    model.asks = False
    items += run(engine)
    for one in (*lines, call):
        assert final(items, one.id) == alone(one)
    assert_idle(engine)


def test_only_steps_of_batches_may_be_interrupted() -> None:
    engine = make_engine(max_num_seqs=8)
    found: list[bool] = []
    engine.observer = lambda step: found.append(engine.scheduler.may_be_interrupted(step))
    engine.add(request("standard", (1, 2, 3), max_tokens=40, ignore_eos=True), priority=1)
    steps(engine, 2)
    engine.add(request("batch", (1, 2, 3), max_tokens=40, ignore_eos=True), priority=2)
    steps(engine, 2)
    for number in range(MAX_LEFT_OUT + 1):
        engine.add(request(f"r{number}", (4, 5), max_tokens=1, ignore_eos=True), priority=0)
        steps(engine, 1)
    steps(engine, 1)
    calls = [False, False]
    batch = [True, True]
    # Steps with prompts of calls: these left out the batch, and the last one must not leave it out again.
    assert found == [*calls, *batch, *[False] * (MAX_LEFT_OUT + 1), True]


def test_batches_advance_while_each_of_their_steps_is_interrupted() -> None:
    engine = make_engine(model=Interrupting(), max_num_seqs=8)
    line = request("line", (1, 2, 3), max_tokens=5, ignore_eos=True)
    engine.add(line, priority=2)
    items = steps(engine, 6 * (MAX_LEFT_OUT + 1))
    assert final(items, "line") == alone(line)
    assert engine.num_interrupted_steps == 5 * MAX_LEFT_OUT, "before each of its five tokens"


def test_batches_advance_while_calls_come_and_interrupt_in_turns() -> None:
    engine = make_engine(model=Interrupting(), max_num_seqs=8)
    line = request("line", (1, 2, 3), max_tokens=5, ignore_eos=True)
    engine.add(line, priority=2)
    items: list[StepItem] = []
    for number in range(5 * (MAX_LEFT_OUT + 1)):
        engine.add(request(f"r{number}", (4, 5), max_tokens=1, ignore_eos=True), priority=0)
        items += steps(engine, 2)
    assert final(items, "line") == alone(line)
