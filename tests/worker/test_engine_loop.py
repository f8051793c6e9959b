"""What the engine's thread shows of itself while a step runs."""

from __future__ import annotations

import pytest

from tests.worker.test_internal import LIMITS, REQUEST, Gated
from worker import engine_loop
from worker.engine.engine import Engine
from worker.engine_loop import EngineLoop


def test_an_engine_in_a_step_that_may_never_end_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gated()
    loop = EngineLoop(Engine(model, LIMITS, (0,), None), lambda commits: None, lambda: None)
    loop.start()
    try:
        loop.add(REQUEST, "attempt", ())
        assert model.entered.acquire(timeout=10)
        free = LIMITS.max_num_seqs - REQUEST.sampling.n
        assert loop.room == free
        monkeypatch.setattr(engine_loop, "LONG_STEP_S", 0.0)
        assert loop.room == 0
        monkeypatch.undo()
        model.go_on.release()
        assert model.entered.acquire(timeout=10)  # the next step
        assert loop.room == free
    finally:
        loop.stop()
        for _ in range(100):
            model.go_on.release()
        loop.join(10)
    assert not loop.is_alive()


def test_an_engine_in_a_step_that_may_never_end_displaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gated()
    loop = EngineLoop(Engine(model, LIMITS, (0,), None), lambda commits: None, lambda: None)
    loop.start()
    try:
        loop.add(REQUEST, "attempt", (), priority=2)
        for _ in range(2):  # what it may displace is known behind the first step
            assert model.entered.acquire(timeout=10)
            model.go_on.release()
        assert model.entered.acquire(timeout=10)
        assert loop.displaceable == (REQUEST.sampling.n, REQUEST.sampling.n)
        monkeypatch.setattr(engine_loop, "LONG_STEP_S", 0.0)
        assert loop.displaceable == (0, 0)
    finally:
        loop.stop()
        for _ in range(100):
            model.go_on.release()
        loop.join(10)
    assert not loop.is_alive()
