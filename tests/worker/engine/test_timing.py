"""Times of steps: their phases by a clock that a test moves, and their sizes."""

from __future__ import annotations

import pytest

from quire.shared.messages import SamplingParams
from quire.worker.engine.sequence import SequenceGroup
from quire.worker.engine.step import DecodeBatch, PrefillChunk, Step
from quire.worker.engine.timing import BATCH, StepTimes


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> StepTimes:
    made = StepTimes()
    monkeypatch.setattr(StepTimes, "clock", staticmethod(Clock()))
    return made


def step(decodes: int, *chunks: int) -> Step:
    group = SequenceGroup("r", (1,), SamplingParams(1, n=max(1, decodes)))
    group.start()
    leader = group.sequences[0]
    batch = DecodeBatch.of(group.sequences[:decodes])
    return Step(batch, [PrefillChunk(leader, count, is_sampled=False) for count in chunks])


def run(
    times: StepTimes, one: Step, collect: float, schedule: float, execute: float, sample: float, rest: float
) -> None:
    """A step whose parts take these seconds."""
    clock = times.clock
    assert isinstance(clock, Clock)
    times.begin_step()
    clock.now += collect
    times.begin_schedule()
    clock.now += schedule
    times.end_schedule()
    clock.now += execute
    times.end_execute()
    began = clock.now
    clock.now += sample
    times.add_sampling(began)
    clock.now += rest
    times.end_step(one)


def test_phases_add_up_to_the_step(times: StepTimes) -> None:
    run(times, step(3), collect=1.0, schedule=2.0, execute=4.0, sample=8.0, rest=16.0)
    run(times, step(3), collect=0.0, schedule=2.0, execute=4.0, sample=8.0, rest=16.0)
    read = times.read()
    assert {name: one.sum for name, one in read.phases.items()} == {
        "schedule": 4.0,
        "execute": 8.0,
        "sample": 16.0,
        "commit": 33.0,
    }
    assert read.seconds["decode"].sum == 61.0


def test_steps_are_counted_by_kind_and_size(times: StepTimes) -> None:
    for one in (step(3), step(2), step(0, 5), step(4, 6, 7)):
        run(times, one, 0, 0, 1, 0, 0)
    read = times.read()
    assert {kind: one.count for kind, one in read.seconds.items()} == {"decode": 2, "prefill": 1, "mixed": 1}
    assert (read.sequences.count, read.sequences.sum) == (4, 3 + 2 + 1 + 6)
    assert (read.tokens["decode"].count, read.tokens["decode"].sum) == (3, 9)
    assert (read.tokens["prefill"].count, read.tokens["prefill"].sum) == (2, 18)


def test_sampling_between_two_steps_belongs_to_none(times: StepTimes) -> None:
    clock = times.clock
    assert isinstance(clock, Clock)
    began = clock.now
    clock.now += 5.0
    times.add_sampling(began)
    run(times, step(1), 0, 1, 1, 2, 0)
    assert times.read().phases["sample"].sum == 2.0


def test_what_is_read_does_not_change_with_later_steps(times: StepTimes) -> None:
    run(times, step(1), 0, 0, 1, 0, 0)
    read = times.read()
    for _ in range(BATCH):
        run(times, step(1), 0, 0, 1, 0, 0)
    assert read.sequences.count == 1
    assert times.sequences.count == BATCH + 1  # sorted without being read
