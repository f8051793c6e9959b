"""The end of background tasks."""

from __future__ import annotations

import asyncio


async def end_tasks(*tasks: asyncio.Task[object] | None) -> None:
    """Cancel tasks, and wait until all have ended; their errors are dropped. None stands for a task never started."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)
