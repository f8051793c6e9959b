"""A cancellation that an awaited command swallows is carried out at the next check."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from quire.shared.redis.cancellation import check_cancelled


async def test_a_task_that_is_not_cancelled_goes_on() -> None:
    check_cancelled()


async def test_a_cancellation_that_was_swallowed_is_raised() -> None:
    async def swallow() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        check_cancelled()
        pytest.fail("the cancellation is lost")

    task = asyncio.create_task(swallow())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
