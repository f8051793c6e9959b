from __future__ import annotations

import asyncio
import time

from quire.shared.telemetry.loop_lag import INTERVAL_S, LoopLag


async def test_a_loop_that_is_blocked_is_late_by_that_time() -> None:
    lag = LoopLag()
    lag.start()
    await asyncio.sleep(0)  # the task sleeps
    time.sleep(INTERVAL_S + 0.2)  # noqa: ASYNC251 - blocks the loop on purpose
    for _ in range(100):
        if lag.seconds.count:
            break
        await asyncio.sleep(0.01)
    await lag.close()
    assert lag.seconds.sum >= 0.19
