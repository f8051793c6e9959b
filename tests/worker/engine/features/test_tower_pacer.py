"""The vision tower waits after a run for as long as the run took, of time in which it was idle."""

from __future__ import annotations

from quire.worker.engine.features.tower_pacer import TowerPacer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def step(pacer: TowerPacer, clock: Clock, seconds: float, runs: bool = False) -> None:
    pacer.begin_step()
    if runs:
        with pacer.run():
            clock.now += seconds
    else:
        clock.now += seconds
    pacer.end_step(1)


def test_a_run_waits_for_steps_that_take_as_long_as_the_last_one() -> None:
    pacer = TowerPacer(clock := Clock())
    step(pacer, clock, 3.0, runs=True)
    for _ in range(3):
        assert not pacer.may_run
        step(pacer, clock, 1.0)
    assert pacer.may_run


def test_time_without_steps_counts_too() -> None:
    pacer = TowerPacer(clock := Clock())
    step(pacer, clock, 3.0, runs=True)
    clock.now += 600
    pacer.begin_step()
    assert pacer.may_run
