"""Background tasks are cancelled and awaited."""

from __future__ import annotations

import asyncio

from quire.shared.tasks import end_tasks


async def test_tasks_have_ended_when_it_returns() -> None:
    events: list[str] = []

    async def run() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")

    tasks = [asyncio.create_task(run()) for _ in range(2)]
    await asyncio.sleep(0)
    await end_tasks(*tasks)
    assert events == ["cleaned up"] * 2
    assert all(task.cancelled() for task in tasks)


async def test_a_task_that_has_failed_raises_nothing() -> None:
    async def fail() -> None:
        raise ValueError("failed")

    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    await end_tasks(task)
    assert isinstance(task.exception(), ValueError)


async def test_a_task_that_was_never_started_is_no_fault() -> None:
    await end_tasks(None)
    await end_tasks()
