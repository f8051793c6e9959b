"""Slots of states: every slot has one use, and snapshots are evicted in the order of their last use."""

from __future__ import annotations

import pytest

from quire.shared.messages import SamplingParams
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.state_slots import SlotCopy, SlotError, StateSlots


def sequence(row: int = -1) -> Sequence:
    one = Sequence(SequenceGroup("r", (1, 2, 3), SamplingParams(max_tokens=1)), 0, (1, 2, 3))
    one.row = row
    return one


def with_snapshots(*keys: bytes) -> StateSlots:
    """Slots with two rows and four others, and these snapshots."""
    slots, holder = StateSlots(2, 6, 8), sequence()
    for at, key in enumerate(keys, 1):
        slots.hold(holder, at)
        slots.keep(holder, at, key)
    return slots


def test_slots_are_those_above_the_rows() -> None:
    slots = StateSlots(2, 6, 8)
    assert [slots.take() for _ in range(5)] == [2, 3, 4, 5, None]


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    slots = with_snapshots(b"a", b"b", b"c", b"d")
    slots.restore(b"a", 0)
    assert slots.take_copies() == [SlotCopy(2, 0)]
    assert slots.take() == 3
    assert (slots.find(b"b"), slots.find(b"a")) == (None, 2)
    assert slots.counters.evictions == 1


def test_a_pinned_snapshot_is_not_evicted() -> None:
    slots = with_snapshots(b"a", b"b", b"c", b"d")
    slots.pin(b"a")
    assert slots.can_take(3)
    assert not slots.can_take(4)
    assert [slots.take() for _ in range(4)] == [3, 4, 5, None]
    with pytest.raises(SlotError, match="without a snapshot"):
        slots.pin(b"b")


def test_a_second_snapshot_of_a_block_and_one_of_an_unknown_block_are_released() -> None:
    slots, holder = with_snapshots(b"a"), sequence()
    for key in (b"a", None):
        slots.hold(holder, 8)
        slots.keep(holder, 8, key)
    assert (slots.num_snapshots, slots.num_free, holder.held_snapshots) == (1, 3, {})


def test_a_snapshot_goes_with_its_block() -> None:
    slots = with_snapshots(b"a", b"b")
    slots.forget(b"a")
    slots.forget(b"unknown")
    assert (slots.find(b"a"), slots.num_free) == (None, 3)


def test_a_decoding_sequence_holds_one_snapshot() -> None:
    slots, one = StateSlots(2, 6, 8), sequence()
    first = slots.hold_last(one, 8)
    assert slots.hold_last(one, 16) == first
    assert one.held_snapshots == {16: first}
    assert slots.num_free == 3


def test_copies_are_returned_once_and_in_order() -> None:
    slots = StateSlots(2, 6, 8)
    slots.copy(0, 1)
    slots.copy(1, 4)
    assert slots.take_copies() == [SlotCopy(0, 1), SlotCopy(1, 4)]
    assert slots.take_copies() == []


def test_a_parked_state_comes_back_to_another_row() -> None:
    slots, one = StateSlots(2, 6, 8), sequence()
    slots.park([one], [0])
    one.row = 1
    slots.unpark(one)
    assert slots.take_copies() == [SlotCopy(0, 2), SlotCopy(2, 1)]
    assert (slots.num_free, one.parked_slot) == (4, None)
    with pytest.raises(SlotError, match="has no state"):
        slots.unpark(one)


def test_a_sequence_frees_all_it_holds() -> None:
    slots, one = StateSlots(2, 6, 8), sequence()
    slots.hold(one, 8)
    slots.hold(one, 16)
    slots.park([one], [0])
    assert slots.num_free == 1
    slots.free(one)
    assert slots.num_free == 4
    slots.check_integrity([one], [])


def test_contradictions_are_found() -> None:
    slots, one = with_snapshots(b"a"), sequence()
    slots.check_integrity([one], [b"a"])
    with pytest.raises(SlotError, match="prefix cache does not know"):
        slots.check_integrity([one], [])
    one.held_snapshots[8] = 2
    with pytest.raises(SlotError, match="do not add up"):
        slots.check_integrity([one], [b"a"])
    one.held_snapshots.clear()
    slots.take()
    with pytest.raises(SlotError, match="do not add up"):
        slots.check_integrity([one], [b"a"])
