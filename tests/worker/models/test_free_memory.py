"""Freed memory goes back to the system while weights are loaded."""

from __future__ import annotations

import pytest

from quire.worker.models.free_memory import FreeMemory


def test_memory_is_returned_after_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, calls = FreeMemory(10), []
    monkeypatch.setattr(memory, "_trim", calls.append)
    for _ in range(5):
        memory.count(4)
    assert calls == [0]  # after 12
    memory.count(2)
    assert calls == [0, 0]
    memory.give_back()
    assert len(calls) == 3


def test_another_c_library_may_lack_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FreeMemory(1)
    monkeypatch.setattr(memory, "_trim", None)
    memory.count(2)
