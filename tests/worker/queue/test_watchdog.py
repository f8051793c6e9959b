"""The watchdog ends a process whose engine does not tick, and no other."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from quire.worker.interpreter import FAILED
from quire.worker.queue.watchdog import Watchdog


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes of the process; exiting ends the calling thread only."""
    codes: list[int] = []

    def exit_process(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", exit_process)
    return codes


def test_an_engine_that_does_not_tick_ends_the_process(exits: list[int]) -> None:
    engine: Any = SimpleNamespace(ticks=3)
    with pytest.raises(SystemExit):
        Watchdog(engine, 0.04).run()
    assert exits == [FAILED]


def test_an_engine_that_ticks_is_left_alone(exits: list[int]) -> None:
    engine: Any = SimpleNamespace(ticks=0)
    watchdog = Watchdog(engine, 0.2)
    watchdog.start()
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        engine.ticks += 1
        time.sleep(0.005)
    watchdog.stop()
    watchdog.join(10)
    assert exits == []


def test_zero_switches_it_off() -> None:
    engine: Any = SimpleNamespace(ticks=0)
    before = threading.active_count()
    Watchdog(engine, 0.0).start()
    assert threading.active_count() == before
