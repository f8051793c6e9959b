"""Pins of calls: what stays in the prefix cache, for how long and for whom, and that they cost no request anything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from quire.shared.protocol.messages import CacheBreakpoint, StepItem
from quire.worker.engine.engine import Engine
from tests.support.mock_model import make_engine, request, run

BLOCK = 4
LENGTH = 24


class Pins:
    """An engine with 64 blocks, of which a fourth may be pinned, half of these by an owner; and its clock."""

    def __init__(self, most: int = 16, most_of_owner: int = 8, **limits: int | str | bool) -> None:
        given = {"prefix_caching": True, "max_pinned_blocks": most, "max_owner_pinned_blocks": most_of_owner} | limits
        self.engine: Engine = make_engine(**given)  # type: ignore[arg-type]
        self.now = 0.0
        self.order.clock = lambda: self.now
        self.num_asked = 0

    @property
    def order(self):  # type: ignore[no-untyped-def]
        return self.engine.groups.blocks.cached

    def ask(self, prompt: Sequence[int], *points: tuple[int, int], owner: str = "") -> tuple[int, tuple[int, int]]:
        """Compute a prompt; returns the tokens that were cached, and those that were pinned for each time."""
        self.num_asked += 1
        asked = request(f"r{self.num_asked}", prompt, max_tokens=1)
        asked = replace(asked, breakpoints=tuple(CacheBreakpoint(*point) for point in points), pinned_for=owner)
        self.engine.add(asked)
        [report] = [item.report for item in run(self.engine) if item.report] or [None]
        return (report.cached_tokens, report.pinned_tokens) if report else (0, (0, 0))

    def press(self, count: int = 20) -> None:
        """Compute other prompts, which take all blocks."""
        for _ in range(count):
            self.ask(prompt(1000 + self.num_asked))


def prompt(number: int, length: int = LENGTH) -> tuple[int, ...]:
    return tuple(random.Random(number).choices(range(1, 96), k=length))


@pytest.mark.parametrize(
    ("points", "written"),
    [
        ([(3, 300)], (0, 0)),
        ([(4, 300)], (4, 0)),
        ([(LENGTH, 300)], (LENGTH, 0)),
        ([(9, 3600)], (0, 8)),
        ([(9, 3600), (LENGTH, 300)], (LENGTH - 8, 8)),
        ([(10_000, 300)], (LENGTH, 0)),
    ],
)
def test_full_blocks_up_to_a_breakpoint_are_pinned(points: list[tuple[int, int]], written: tuple[int, int]) -> None:
    pins = Pins()
    assert pins.ask(prompt(1), *points) == (0, written)
    assert pins.order.num_pinned * BLOCK == sum(written)
    pins.press()
    # A prompt that begins alike reads them, and pins nothing anew.
    cached, again = pins.ask(prompt(1), *points)
    assert cached >= sum(written)
    assert again == (0, 0) or not written[0] + written[1]


def test_a_pin_ends_with_its_time_which_each_use_begins_anew() -> None:
    pins = Pins()
    pins.ask(prompt(1), (LENGTH, 300))
    pins.now = 299
    pins.press()
    assert pins.ask(prompt(1))[0] == LENGTH  # used by a request without a breakpoint
    pins.now = 299 + 299
    pins.press()
    assert pins.ask(prompt(1))[0] == LENGTH
    pins.now += 300
    pins.press()
    assert pins.ask(prompt(1))[0] == 0
    assert pins.order.num_pinned == 0
    assert pins.order.counters.expired == LENGTH // BLOCK


def test_an_owner_over_its_bound_loses_its_least_recently_used_pins_and_no_one_elses() -> None:
    pins = Pins(most=16, most_of_owner=8)
    pins.ask(prompt(1), (LENGTH, 300), owner="a")
    for number in range(2, 6):
        pins.ask(prompt(number), (LENGTH, 300), owner="b")
        assert pins.order.num_pinned <= 6 + 8
    pins.press()
    assert pins.ask(prompt(1))[0] == LENGTH
    assert pins.ask(prompt(5))[0] == LENGTH
    # The end of the prefix before it went first.
    assert pins.ask(prompt(4))[0] == 2 * BLOCK
    assert pins.ask(prompt(2))[0] == 0
    # A prefix that is too long is pinned from its beginning.
    assert pins.ask(prompt(9, 60), (60, 300), owner="b")[1] == (8 * BLOCK, 0)


def test_a_newcomer_takes_from_the_owner_with_the_most() -> None:
    pins = Pins(most=12, most_of_owner=8)
    pins.ask(prompt(1), (LENGTH, 300), (LENGTH, 300), owner="a")
    pins.ask(prompt(2, 8), (8, 300), owner="a")
    pins.ask(prompt(3, 16), (16, 300), owner="b")
    assert pins.order.num_pinned == 12
    assert pins.ask(prompt(4, 16), (16, 300), owner="c")[1] == (16, 0)
    assert pins.order.num_pinned == 12
    pins.press()
    assert [pins.ask(prompt(3, 16))[0], pins.ask(prompt(4, 16))[0]] == [16, 16]


def test_pins_off_or_without_a_prefix_cache_count_nothing() -> None:
    for pins in (Pins(most=0), Pins(most_of_owner=0), Pins(prefix_caching=False)):
        assert pins.ask(prompt(1), (LENGTH, 300))[1] == (0, 0)
        assert pins.order.num_pinned == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_pins_cost_running_requests_neither_a_step_nor_a_preemption(preemption: str) -> None:
    """The same requests, with all blocks pinned before and with none, take the same steps."""

    def steps_of(most: int) -> tuple[int, int, list[StepItem]]:
        pins = Pins(most, most, preemption=preemption, num_host_blocks=32)
        for number in range(10):
            pins.ask(prompt(number), (LENGTH, 3600))
        engine = pins.engine
        assert pins.order.num_pinned == min(most, 60)
        before = engine.num_steps
        for number in range(100, 112):
            engine.add(request(f"long {number}", prompt(number, 30), max_tokens=50, ignore_eos=True))
        items = run(engine)
        return engine.num_steps - before, engine.groups.num_preemptions, items

    taken, preempted, items = steps_of(64)
    assert (taken, preempted, items) == steps_of(0)
    assert preempted > 0


def test_memory_that_a_request_needs_ends_pins_before_it_waits() -> None:
    pins = Pins(most=64, most_of_owner=64)
    for number in range(10):
        pins.ask(prompt(number), (LENGTH, 3600))
    pins.engine.add(request("long", prompt(50, 100), max_tokens=28, ignore_eos=True))
    assert len([item for item in run(pins.engine) if item.deltas]) == 28
    assert pins.order.counters.yielded > 0
    # The least recently used pins went first.
    assert pins.ask(prompt(9))[0] == LENGTH
    assert pins.ask(prompt(0))[0] == 0
