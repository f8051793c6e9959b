"""Memory that large bodies have used goes back to the operating system."""

from __future__ import annotations

import asyncio
import ctypes

import pytest

from quire.gateway.api import memory
from quire.gateway.api.memory import LARGE, MemoryReturn
from tests.support.gateway.running import until


async def test_memory_is_given_back_once_after_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PAUSE_S", 0.01)
    calls: list[int] = []
    monkeypatch.setattr(memory, "_trim", lambda: calls.append)
    back = MemoryReturn()
    back.note(LARGE - 1)
    await asyncio.sleep(0)
    for _ in range(3):
        back.note(LARGE)

    async def is_called() -> bool:
        return calls == [0]

    await until(is_called)
    assert back._freed == 0


def test_the_c_library_is_asked() -> None:
    trim = memory._trim()
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("the C library has no malloc_trim")
    assert trim is not None
    assert trim(0) in (0, 1)
