"""Notices a cancellation of a task that an awaited Redis command has swallowed."""

from __future__ import annotations

import asyncio


def check_cancelled() -> None:
    """Raise CancelledError if the current task has been cancelled.

    redis-py sends within `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives together with
    the result. A loop that calls Redis calls this after each command.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
