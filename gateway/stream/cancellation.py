"""Cancellation that was swallowed on the way is noticed and carried out."""

from __future__ import annotations

import asyncio


def check_cancelled() -> None:
    """Raise CancelledError if the current task was told to end.

    redis-py sends within `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes in the same
    moment as the result. So whoever calls Redis in a loop asks after each call.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
