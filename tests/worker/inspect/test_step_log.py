"""The step log reports each step once, keeps the latest ones and counts the moves that it drops."""

from __future__ import annotations

from quire.shared.views import MAX_MOVES, MAX_STEPS, Move
from quire.worker.engine.step import Step
from quire.worker.inspect.step_log import RecentSteps, StepLog
from tests.worker.inspect.test_snapshot import add, make_engine


def steps_of(log: StepLog, **params: int) -> list[Step]:
    """The steps of one request with a log as the engine's observer."""
    seen: list[Step] = []
    engine = make_engine()

    def observe(step: Step) -> None:
        seen.append(step)
        log(step)

    engine.observer = observe
    add(engine, "a", tuple(range(1, 21)), **params)
    while engine.has_work:
        engine.step()
    return seen


def test_steps_are_reported_once_with_the_latest_prefill_as_the_batch() -> None:
    log = StepLog()
    steps = steps_of(log, max_tokens=4)
    found = log.take()
    assert found.steps == ((0, 16), (0, 4), (1, 0), (1, 0), (1, 0))
    assert found.shown is steps[1]
    assert log.take() == RecentSteps()


def test_only_the_latest_steps_are_kept() -> None:
    log = StepLog()
    steps_of(log, max_tokens=MAX_STEPS + 20)
    assert log.take().steps == ((1, 0),) * MAX_STEPS


def test_moves_beyond_the_limit_are_counted() -> None:
    log = StepLog()
    engine = make_engine()
    add(engine, "a", (1, 2, 3))
    step = engine.scheduler.schedule()
    step.copies = [(block, block + 1) for block in range(MAX_MOVES + 3)]
    log(step)
    found = log.take()
    assert (len(found.moves), found.hidden_moves) == (MAX_MOVES, 3)
    assert found.moves[-1] == Move("copy", MAX_MOVES + 2, MAX_MOVES + 3)
