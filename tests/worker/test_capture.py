"""CUDA graphs are captured at start, as many as time and memory allow; what they take is known before the cache is."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch

from tests.worker.mock_model import CalledAgain, MockModel, make_engine, record, request, run
from worker.capture import capture_graphs, graph_rooms, measure_graphs
from worker.engine.device_runner import DeviceRunner
from worker.engine.engine import Engine
from worker.engine.graphs import GREEDY, MIXED, Graphs, Room
from worker.engine.limits import EngineLimits
from worker.engine.rows import Rows


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 16), (8, 24), (64, 256), (256, 8192), (256, 300), (4096, 8192)])
def test_every_step_within_the_limits_has_a_graph_that_is_not_much_larger(sequences: int, tokens: int) -> None:
    rooms = graph_rooms(sequences, tokens)
    draw = random.Random(0)
    for _ in range(2000):
        many = draw.randint(2, tokens)
        few = draw.randint(1, min(sequences, many - 1))
        fitting = [one for one in rooms if one.kind == MIXED and one.tokens >= many and one.sequences >= few]
        assert fitting, (many, few)
        assert min(one.tokens for one in fitting) <= max(many + 64, many * 1.27)
    for count in range(1, sequences + 1):
        assert any(one.kind == GREEDY and one.sequences >= count for one in rooms)
    assert all(one.tokens > one.sequences for one in rooms if one.kind == MIXED)


class Launched:
    """Rooms in the order of what was done with them."""

    def __init__(self, too_large: tuple[Room, ...] = ()) -> None:
        self.captured: list[Room] = []
        self.too_large = too_large

    def __call__(self, room: Room) -> None:
        if room in self.too_large:
            raise torch.OutOfMemoryError
        self.captured.append(room)


def graphs(launched: Launched, *rooms: Room) -> Graphs:
    return Graphs(rooms, lambda room: None, launched, lambda launch, pool: (CalledAgain(launch), "pool"))


SMALL, MIDDLE, LARGE = Room(MIXED, 16, 8), Room(MIXED, 64, 8), Room(MIXED, 128, 8)


def test_graphs_are_captured_largest_first_and_the_smallest_with_room_is_taken() -> None:
    launched = Launched()
    made = graphs(launched, MIDDLE, LARGE, SMALL)
    assert made.find(MIXED, 1, 1) is None
    assert made.capture_next()
    assert launched.captured == [LARGE]
    assert made.find(MIXED, 1, 1) == (LARGE, made._graphs[LARGE])  # rather than to capture while requests run
    while made.capture_next():
        pass
    assert launched.captured == [LARGE, MIDDLE, SMALL]
    for tokens, sequences, expected in ((16, 8, SMALL), (17, 1, MIDDLE), (65, 1, LARGE)):
        found = made.find(MIXED, tokens, sequences)
        assert found is not None
        assert found[0] == expected
    assert made.find(MIXED, 129, 1) is made.find(MIXED, 1, 9) is made.find(GREEDY, 1, 1) is None


def test_a_graph_that_memory_has_no_room_for_is_left_out_and_smaller_ones_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = graphs(Launched(too_large=(LARGE,)), MIDDLE, LARGE, SMALL)
    while made.capture_next():
        pass
    assert (made.num_captured, made.num_missing) == (2, 0)
    assert made.find(MIXED, 65, 1) is None
    assert "out of device memory for the CUDA graph of 128 tokens" in caplog.text


class Card:
    """The memory of a device, as torch tells it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 1000
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 2000))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def test_the_memory_of_all_graphs_is_measured_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    card, model, taken = Card(monkeypatch), MockModel(), [100, 7]
    model.ops.device = torch.device("cpu")

    def weighed(launch: Any, pool: Any) -> Any:
        card.free -= taken.pop(0)
        return record(launch, pool)

    limits = EngineLimits(num_blocks=500, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    assert measure_graphs(model, limits, weighed) == 100 + 7 * (len(graph_rooms(8, 64)) - 1)  # type: ignore[arg-type]
    assert not taken


def waiting_engine() -> Engine:
    """All of its graphs are still to be captured."""

    def runner(model: Any, limits: EngineLimits, rows: Rows) -> DeviceRunner:
        return DeviceRunner(model, limits, rows, graph_rooms(limits.max_num_seqs, 16), record)

    return make_engine(runner=runner)


def test_all_graphs_are_captured_before_the_worker_is_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Card(monkeypatch)
    caplog.set_level(logging.INFO)
    engine = waiting_engine()
    count = len(graph_rooms(8, 16))
    capture_graphs(engine)
    assert not engine.prepare()
    assert f"captured {count} of {count} CUDA graphs" in caplog.text
    capture_graphs(make_engine())  # a runner that has none


def test_what_takes_too_long_is_left_for_idle_moments_and_steps_do_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Card(monkeypatch)
    caplog.set_level(logging.INFO)
    engine = waiting_engine()
    now = iter(range(0, 10_000, 4))
    capture_graphs(engine, clock=lambda: next(now))
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    assert 0 < runner.graphs.num_captured < 4
    assert runner.graphs.num_missing
    assert "captured 1 of" in caplog.text
    assert "the rest follow while nothing runs" in caplog.text
    captured = runner.graphs.num_captured
    engine.add(request("r", (1, 2, 3), ignore_eos=True))
    run(engine)
    assert runner.graphs.num_captured == captured
    assert engine.prepare()
    assert runner.graphs.num_captured == captured + 1
