"""Measures the lag of an event loop: the time that a callback waits after it is due."""

from __future__ import annotations

import asyncio
import time

from quire.shared.process.tasks import end_tasks
from quire.shared.telemetry.prometheus import STEP_S, Histogram

INTERVAL_S = 0.05


class LoopLag:
    """Wakes up every INTERVAL_S and records the delay. Call `start` and `close` in the loop to measure."""

    def __init__(self) -> None:
        self.seconds = Histogram(STEP_S)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="loop lag")

    async def close(self) -> None:
        await end_tasks(self._task)

    async def _run(self) -> None:
        while True:
            due = time.perf_counter() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.seconds.observe(max(0.0, time.perf_counter() - due))
