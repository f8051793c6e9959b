"""What a host loads and unloads: rules on single moments, and a machine that plays whole days of demand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.worker.host.plan import Eviction, LoadPlan, ModelDemand, Phase, Room, make_plan

ROOM = Room(most=2, size=100, slice_s=20.0, idle_s=0.0)


def ready(name: str, *, ready_at: float = 0.0, used_at: float = 0.0, size: int = 40, busy: bool = False) -> ModelDemand:
    return ModelDemand(name, size, Phase.READY, not busy, ready_at=ready_at, used_at=used_at)


def waits(name: str, since: float, size: int = 40) -> ModelDemand:
    return ModelDemand(name, size, is_idle=False, wanted_since=since)


def evicts(*names: str, why: str = "room", successor: str = "new") -> LoadPlan:
    return LoadPlan((), tuple(Eviction(name, why, successor if why != "idle" else "") for name in names))


@pytest.mark.parametrize(
    ("models", "room", "plan"),
    [
        ([waits("b", 5), waits("a", 3)], ROOM, LoadPlan(("a", "b"))),
        ([waits("a", 3), waits("b", 4), waits("c", 5)], ROOM, LoadPlan(("a", "b"))),
        # A place is free, but no memory.
        ([ready("x", size=70, busy=True), waits("new", 90)], ROOM, LoadPlan()),
        ([ready("x", size=70), waits("new", 90)], ROOM, evicts("x")),
        # The idle model that was used longest ago goes first, and no more than necessary.
        ([ready("x", used_at=8), ready("y", used_at=7), waits("new", 90)], ROOM, evicts("y")),
        ([ready("x", used_at=8), ready("y", used_at=7), waits("new", 90, size=90)], ROOM, evicts("y", "x")),
        ([ready("x", used_at=1, busy=True), ready("y", used_at=7), waits("new", 90)], ROOM, evicts("y")),
        # Models with requests keep their workers until their slice is over, and the other has waited for one.
        ([ready("x", ready_at=85, busy=True), ready("y", ready_at=82, busy=True), waits("new", 75)], ROOM, LoadPlan()),
        ([ready("x", ready_at=60, busy=True), ready("y", ready_at=50, busy=True), waits("new", 85)], ROOM, LoadPlan()),
        (
            [ready("x", ready_at=60, busy=True), ready("y", ready_at=50, busy=True), waits("new", 75)],
            ROOM,
            evicts("y", why="slice"),
        ),
        # A worker that stops makes room: nothing else has to go.
        ([ModelDemand("x", 40, Phase.STOPPING), ready("y"), waits("new", 75)], ROOM, LoadPlan()),
        ([ModelDemand("x", 40, Phase.LOADING), ready("y", busy=True), waits("new", 95)], ROOM, LoadPlan()),
        # Nobody overtakes a large model that waits.
        ([ready("x", busy=True), waits("large", 85, size=90), waits("small", 90)], ROOM, LoadPlan()),
        ([ready("x", used_at=95), ready("y", used_at=80)], ROOM, LoadPlan()),
        ([ready("x", used_at=95), ready("y", used_at=80)], Room(2, 100, 20.0, 10.0), evicts("y", why="idle")),
    ],
)
def test_the_plan_of_a_moment(models: list[ModelDemand], room: Room, plan: LoadPlan) -> None:
    assert make_plan(models, room, now=100.0) == plan


class Day:
    """A host in small: workers load and stop in a step each, and requests are played by the test."""

    def __init__(self, sizes: list[int], room: Room) -> None:
        self.models = [ModelDemand(f"m{number}", size) for number, size in enumerate(sizes)]
        self.room, self.now = room, 0.0
        self.longest_wait = 0.0

    def step(self, has_requests: Callable[[ModelDemand], bool]) -> None:
        self.now += 1.0
        for model in self.models:
            model.is_idle = not has_requests(model)
            if model.phase is Phase.LOADING:
                model.phase, model.ready_at = Phase.READY, self.now
            elif model.phase is Phase.STOPPING:
                model.phase = Phase.NONE
            if not model.is_idle:
                model.used_at = self.now
            waits = model.phase is Phase.NONE and not model.is_idle
            model.wanted_since = (model.wanted_since or self.now) if waits else None
            if model.wanted_since is not None:
                self.longest_wait = max(self.longest_wait, self.now - model.wanted_since)
        plan = make_plan(self.models, self.room, self.now)
        by_name = {model.name: model for model in self.models}
        for eviction in plan.evict:
            assert by_name[eviction.name].phase is Phase.READY
            by_name[eviction.name].phase = Phase.STOPPING
        for name in plan.load:
            assert by_name[name].phase is Phase.NONE
            by_name[name].phase, by_name[name].wanted_since = Phase.LOADING, None
        held = [model for model in self.models if model.phase is not Phase.NONE]
        assert len(held) <= self.room.most
        assert sum(model.size for model in held) <= self.room.size


@given(
    st.lists(st.integers(1, 100), min_size=2, max_size=6),
    st.integers(1, 3),
    st.integers(1, 10),
    st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=40),
)
def test_no_day_exceeds_the_room_and_every_model_gets_its_turn(
    sizes: list[int], most: int, slice_s: int, demand: list[set[int]]
) -> None:
    day = Day(sizes, Room(most, 100, slice_s, 0.0))
    for wanted in demand:
        day.step(lambda model, wanted=wanted: int(model.name[1:]) in wanted)  # type: ignore[misc]
    # From now on all models always have requests.
    day.longest_wait = 0.0
    turns = set()
    for _ in range(8 * len(sizes) * (slice_s + 4)):
        day.step(lambda model: True)
        turns |= {model.name for model in day.models if model.phase is Phase.READY}
    assert turns == {model.name for model in day.models}
    # Each of the others is served for a slice at most, after it has been loaded and before it has stopped.
    assert day.longest_wait <= 2 * len(sizes) * (slice_s + 4)
