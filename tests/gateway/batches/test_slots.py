"""Slots go to the owner that has fewest; a line that waits for a limit holds none, and keeps no other owner waiting."""

from __future__ import annotations

import asyncio

from quire.gateway.batches.slots import LineSlots, Turn


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def waits(slots: LineSlots, owner: str, count: int, batch: str = "") -> tuple[list[Turn], list[asyncio.Task[None]]]:
    turns = [slots.turn(owner, batch or owner) for _ in range(count)]
    return turns, [asyncio.create_task(turn.wait()) for turn in turns]


def with_slots(turns: list[Turn]) -> list[int]:
    return [number for number, turn in enumerate(turns) if turn.has_slot]


def nothing() -> None:
    pass


async def test_owners_take_turns() -> None:
    slots = LineSlots(4, nothing)
    many, _ = waits(slots, "a", 20)
    await settled()
    assert with_slots(many) == [0, 1, 2, 3]
    assert not slots.may_begin("a")
    assert slots.may_begin("b")
    few, _ = waits(slots, "b", 3)
    await settled()
    # The next slots go to the other owner until both have the same number.
    for number in range(3):
        many[number].accepted()
        many[number].give_back()
        await settled()
    assert with_slots(few) == [0, 1]
    assert with_slots(many) == [3, 4]
    few[0].give_back()
    await settled()
    assert with_slots(few) == [1, 2]


async def test_an_owner_that_waits_for_a_limit_holds_no_slot() -> None:
    slots = LineSlots(4, nothing)
    turns, _ = waits(slots, "a", 8)
    await settled()
    turns[0].accepted()
    for turn in turns[1:4]:
        turn.give_back(pause_s=60)
    again = [asyncio.create_task(turn.wait()) for turn in turns[1:4]]
    await settled()
    assert slots.taken == 1
    other, _ = waits(slots, "b", 3)
    await settled()
    assert with_slots(other) == [0, 1, 2]
    # The end of a line may be what the limit waits for: the owner tries its next line, and no second one.
    turns[0].give_back()
    for turn in other:
        turn.give_back()
    await settled()
    assert with_slots(turns) == [1]
    # Each line that is accepted doubles the number of lines that are tried.
    turns[1].accepted()
    await settled()
    assert with_slots(turns) == [1, 2, 3]
    assert len(again) == 3


async def test_a_pause_ends_in_time_also_with_a_single_line() -> None:
    slots = LineSlots(2, nothing)
    (turn,), tasks = waits(slots, "a", 1)
    await settled()
    turn.give_back(pause_s=0.05)
    task = asyncio.create_task(turn.wait())
    await settled()
    assert not turn.has_slot
    await asyncio.wait_for(task, 5)
    assert turn.has_slot
    turn.give_back()
    assert slots.taken == 0
    assert not slots._owners
    await asyncio.gather(*tasks)


async def test_lines_that_are_given_up_leave_nothing_behind() -> None:
    changes = 0

    def changed() -> None:
        nonlocal changes
        changes += 1

    slots = LineSlots(1, changed)
    turns, tasks = waits(slots, "a", 3)
    await settled()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    turns[0].give_back()
    assert (slots.taken, slots._owners) == (0, {})
    assert changes > 0
    # A line that gets a slot in the moment in which it is given up returns it.
    first, _ = waits(slots, "a", 1)
    second, tasks = waits(slots, "a", 1)
    await settled()
    tasks[0].cancel()
    first[0].give_back()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (slots.taken, second[0].has_slot) == (0, False)


async def test_the_lines_of_a_batch_that_has_ended_do_not_wait_any_more() -> None:
    slots = LineSlots(1, nothing)
    turns, _ = waits(slots, "a", 2, "first")
    other, others = waits(slots, "a", 1, "second")
    ended, tasks = waits(slots, "a", 3, "first")
    await settled()
    slots.let_go("first")
    await asyncio.gather(*tasks)
    assert with_slots(ended) == []
    assert with_slots(turns) == [0]
    turns[0].give_back()
    await asyncio.gather(*others)
    assert with_slots(other) == [0]
