"""Lines take slots; a window that is given up leaves none behind."""

from __future__ import annotations

import asyncio

from quire.gateway.batches.slots import LineSlots


async def test_lines_wait_for_slots() -> None:
    changes: list[int] = []
    slots = LineSlots(2, lambda: changes.append(slots.taken))
    release, most = asyncio.Event(), 0

    async def line() -> None:
        nonlocal most
        async with slots.one(waiting):
            most = max(most, slots.taken)
            await release.wait()

    with slots.window(5) as waiting:
        assert not slots.has_room
        tasks = [asyncio.create_task(line()) for _ in range(5)]
        await asyncio.sleep(0)
        assert (slots.taken, slots.waiting) == (2, 3)
        release.set()
        await asyncio.gather(*tasks)
    assert (most, slots.taken, slots.waiting) == (2, 0, 0)
    assert slots.has_room
    assert changes


async def test_lines_of_a_window_that_is_given_up_do_not_wait_any_more() -> None:
    slots = LineSlots(1, lambda: None)
    with slots.window(3) as waiting:
        async with slots.one(waiting):
            task = asyncio.create_task(slots.one(waiting).__aenter__())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert slots.waiting == 2
    assert (slots.waiting, slots.taken) == (0, 0)
    assert slots.has_room
