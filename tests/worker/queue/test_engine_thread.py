"""The status and the answers of the engine thread: in a step, between steps, without work, and at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from quire.shared.protocol.broker import ComputedTokens, StepCommit
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.queue import engine_thread
from quire.worker.queue.engine_thread import EngineGone, EngineThread
from tests.worker.inspect.test_admin_server import LIMITS, REQUEST, Gated


@contextmanager
def running(model: Gated) -> Iterator[EngineThread]:
    loop = EngineThread(Engine(model, LIMITS, (0,), None), lambda commits, computed: None, lambda: None)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()
        for _ in range(100):
            model.go_on.release()
        loop.join(60)
    assert not loop.is_alive()


def test_an_engine_in_a_step_that_may_never_end_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gated()
    with running(model) as loop:
        loop.add(REQUEST, "attempt", ())
        assert model.entered.acquire(timeout=60)
        free = LIMITS.max_num_seqs - REQUEST.sampling.n
        assert loop.free_rows == free
        monkeypatch.setattr(engine_thread, "LONG_STEP_S", 0.0)
        assert loop.free_rows == 0
        monkeypatch.undo()
        model.go_on.release()
        assert model.entered.acquire(timeout=60)  # the next step
        assert loop.free_rows == free


def test_an_engine_in_a_step_that_may_never_end_displaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gated()
    with running(model) as loop:
        loop.add(REQUEST, "attempt", (), priority=2)
        assert model.entered.acquire(timeout=60)
        model.go_on.release()  # the displaceable rows are known after the first step
        assert model.entered.acquire(timeout=60)
        assert loop.displaceable == (REQUEST.sampling.n, REQUEST.sampling.n)
        monkeypatch.setattr(engine_thread, "LONG_STEP_S", 0.0)
        assert loop.displaceable == (0, 0)


def test_standard_requests_may_be_displaced_by_the_first_class_only() -> None:
    model = Gated()
    with running(model) as loop:
        loop.add(REQUEST, "attempt", (), priority=1)
        assert model.entered.acquire(timeout=60)
        model.go_on.release()
        assert model.entered.acquire(timeout=60)
        assert loop.displaceable == (REQUEST.sampling.n, 0)


def test_what_is_on_its_way_into_a_step_can_no_longer_be_displaced() -> None:
    """Otherwise a worker would read all urgent requests during one step, but can displace only a few requests."""
    model, rows = Gated(), REQUEST.sampling.n
    with running(model) as loop:
        for name in ("low", "lower"):
            loop.add(replace(REQUEST, id=name), "attempt", (), priority=2)
        assert model.entered.acquire(timeout=60)
        model.go_on.release()
        assert model.entered.acquire(timeout=60)
        assert loop.displaceable == (2 * rows, 2 * rows)
        loop.add(replace(REQUEST, id="urgent"), "attempt", (), priority=0)
        assert loop.displaceable == (rows, rows)
        loop.add(replace(REQUEST, id="more"), "attempt", (), priority=0)
        assert loop.displaceable == (0, 0)
        loop.add(replace(REQUEST, id="too much"), "attempt", (), priority=0)
        assert loop.displaceable == (0, 0)


def test_a_request_of_a_higher_class_interrupts_a_step_of_batches_and_one_of_their_class_does_not() -> None:
    model = Gated()
    with running(model) as loop:
        interrupt = loop._engine.interrupt
        loop.add(REQUEST, "attempt", (), priority=2)
        assert model.entered.acquire(timeout=60)
        loop.add(replace(REQUEST, id="line"), "attempt", (), priority=2)
        assert not interrupt.is_requested
        loop.add(replace(REQUEST, id="call"), "attempt", (), priority=1)
        assert interrupt.is_requested
        model.go_on.release()
        assert model.entered.acquire(timeout=60)
        assert not interrupt.is_requested, "the next step has the prompt of the call"


def test_one_slow_step_is_forgotten_in_time() -> None:
    model = Gated()
    with running(model) as loop:
        loop.add(REQUEST, "attempt", ())
        assert model.entered.acquire(timeout=60)
        time.sleep(0.05)  # the step takes this long
        model.go_on.release()
        assert model.entered.acquire(timeout=60)
        shown = loop.status.slowest_step_s
        assert shown > 0.04
        later = time.monotonic() + 2 * engine_thread.SLOW_STEP_HALF_LIFE_S
        assert loop._slowest_step.at(later) < shown / 3


def until_idle(loop: EngineThread) -> None:
    ticks, end = loop.ticks, time.monotonic() + 60
    while loop.status.running or loop.ticks < ticks + 2:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_gaps_are_between_the_steps_of_work_and_not_the_time_without_any() -> None:
    model = Gated()
    with running(model) as loop:
        loop.add(REQUEST, "attempt", ())
        for steps in range(3):
            assert model.entered.acquire(timeout=60)
            assert loop.gaps.count == steps
            shown = loop.ticked_at
            model.go_on.release()
        assert model.entered.acquire(timeout=60)
        assert loop.ticked_at > shown
        # The request ends by a cancellation, and not in a step.
        loop.finish(REQUEST.id, "cancelled")
        model.go_on.release()
        until_idle(loop)
        assert loop.gaps.count == 3
        loop.add(REQUEST, "another", ())
        assert model.entered.acquire(timeout=60)
        assert loop.gaps.count == 3


def test_an_engine_without_work_sleeps() -> None:
    with running(Gated()) as loop:
        ticks, idle_s, began = loop.ticks, loop.idle_s, time.monotonic()
        time.sleep(0.02)
        ticked = loop.ticks - ticks
        assert ticked <= 2 + (time.monotonic() - began) / engine_thread.IDLE_TICK_S
        until_idle(loop)
        assert loop.idle_s > idle_s


def test_who_asks_an_engine_without_work_does_not_wait_for_its_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "IDLE_TICK_S", 60.0)
    model = Gated()
    with running(model) as loop:
        assert loop.call(lambda engine: engine.num_steps).result(60) == 0
        loop.add(REQUEST, "attempt", ())
        assert model.entered.acquire(timeout=60)
        loop.drop(REQUEST.id, "attempt")
        model.go_on.release()
        assert loop.call(lambda engine: engine.has_work).result(60) is False
        time.sleep(0.01)  # the thread sleeps now, and `running` stops it


def test_what_is_asked_of_an_engine_that_ends_is_answered_whatever_came_of_it() -> None:
    model = Gated()
    with running(model) as loop:
        loop.add(REQUEST, "attempt", ())
        assert model.entered.acquire(timeout=60)
        early, cancelled, late = (loop.call(lambda engine: engine.num_steps) for _ in range(3))
        assert cancelled.cancel()
        loop.stop()
    for future in (early, late, loop.call(lambda engine: engine.num_steps)):
        with pytest.raises(EngineGone):
            future.result(0)
    assert cancelled.cancelled()
    assert loop.failure is None


def test_a_call_that_fails_is_the_callers_and_one_that_is_cancelled_is_not_made() -> None:
    model, made = Gated(), []
    with running(model) as loop:
        loop.add(REQUEST, "attempt", ())
        assert model.entered.acquire(timeout=60)
        assert loop.call(lambda engine: made.append(1)).cancel()
        failing, after = loop.call(lambda engine: 1 // 0), loop.call(lambda engine: engine.num_steps)
        model.go_on.release()
        assert after.result(60) == 1
        with pytest.raises(ZeroDivisionError):
            failing.result(60)
        assert made == []


def test_the_tokens_of_a_ranked_request_leave_before_its_end_with_the_token_of_their_attempt() -> None:
    model, emitted = Gated(), list[tuple[list[StepCommit], list[ComputedTokens]]]()
    ended = threading.Event()

    def emit(commits: list[StepCommit], computed: list[ComputedTokens]) -> None:
        emitted.append((commits, computed))
        if any(commit.item.outcome for commit in commits):
            ended.set()

    loop = EngineThread(Engine(model, LIMITS, (0,), None), emit, lambda: None)
    loop.start()
    sampling = SamplingParams(max_tokens=50, best_of=3, temperature=1.0, ignore_eos=True)
    loop.add(replace(REQUEST, sampling=sampling), "attempt", ())
    for _ in range(4):
        model.go_on.release()
        assert model.entered.acquire(timeout=60)
    loop.finish(REQUEST.id, "cancelled")
    for _ in range(50):
        model.go_on.release()
    assert ended.wait(60)
    loop.stop()
    loop.join(60)
    counts = [one for _, computed in emitted for one in computed]
    assert {(one.request_id, one.attempt) for one in counts} == {(REQUEST.id, "attempt")}
    assert counts[0].tokens == 3
    [end] = [number for number, (commits, _) in enumerate(emitted) if commits]
    assert emitted[end][0][0].item.start == 0
    # Nothing of the request comes after its end.
    assert not any(computed for _, computed in emitted[end + 1 :])
    assert counts[-1].tokens == max(one.tokens for one in counts) >= 9


def test_a_grammar_that_cannot_be_prepared_ends_its_request_when_that_starts() -> None:
    model, emitted = Gated(), list[StepCommit]()
    loop = EngineThread(
        Engine(model, LIMITS, (0,), None), lambda commits, computed: emitted.extend(commits), lambda: None
    )
    assert loop.free_rows == LIMITS.max_num_seqs, "requests may be added before the thread runs"
    request = replace(REQUEST, sampling=SamplingParams(max_tokens=5, grammar="no grammar"))
    loop.prepare(request)
    loop.add(request, "attempt", ())
    loop.start()
    until_idle(loop)
    loop.stop()
    loop.join(10)
    [(attempt, item)] = emitted
    assert (attempt, item.request_id, item.outcome is not None and item.outcome.name) == (
        "attempt",
        REQUEST.id,
        "error",
    )
    assert loop.free_rows == LIMITS.max_num_seqs
