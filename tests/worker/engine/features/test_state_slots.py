"""Slots of recurrent states, and blocks with snapshots."""

from __future__ import annotations

import pytest

from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.blocks import Copy
from quire.worker.engine.features.states.blocks import StatefulBlockManager
from quire.worker.engine.features.states.slots import SlotError, StateSlots
from quire.worker.engine.sequence import Sequence, SequenceGroup


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


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    slots = with_snapshots(b"a", b"b", b"c", b"d")
    slots.restore(b"a", 0)
    assert slots.take_copies() == [Copy(2, 0)]
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


def test_a_parked_state_comes_back_to_another_row() -> None:
    slots, one = StateSlots(2, 6, 8), sequence()
    slots.park([one], [0])
    one.row = 1
    slots.unpark(one)
    assert slots.take_copies() == [Copy(0, 2), Copy(2, 1)]
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


def manager(num_slots: int = 10, num_blocks: int = 8, **options: bool) -> StatefulBlockManager:
    """Blocks of 4 tokens, two rows, and a snapshot every 8 tokens."""
    return StatefulBlockManager(num_blocks, 4, states=StateSlots(2, num_slots, 8), **options)


def sequence_of(length: int, first: int = 1) -> Sequence:
    tokens = tuple(range(first, first + length))
    return Sequence(SequenceGroup("r", tokens, SamplingParams(max_tokens=1)), 0, tokens)


def compute(blocks: StatefulBlockManager, one: Sequence) -> list[int]:
    """Compute a prompt as one chunk, and free it. Returns the numbers of tokens of its snapshots."""
    count = len(one.token_ids)
    blocks.start(one, blocks.find_prefix(one, count), count)
    taken = blocks.plan_snapshots(one, one.num_stored, count, count)
    one.num_computed = count
    blocks.cache_full_blocks(one, count)
    blocks.free(one)
    blocks.check_integrity([one])
    return [at for at, _ in taken]


def test_snapshots_are_taken_at_the_interval_and_at_the_last_full_blocks() -> None:
    assert compute(manager(), sequence_of(22)) == [20, 16, 8]
    assert compute(manager(), sequence_of(20)) == [20, 16, 8], "an equal prompt can use the one after 16 tokens"
    assert compute(manager(), sequence_of(3)) == []
    assert compute(manager(prefix_caching=False), sequence_of(22)) == []


def test_if_slots_are_short_the_last_snapshots_are_taken() -> None:
    assert compute(manager(num_slots=4), sequence_of(22)) == [20, 16]
    assert compute(manager(num_slots=2), sequence_of(22)) == []


def test_a_prefix_ends_at_its_last_snapshot_and_leaves_a_token_to_compute() -> None:
    blocks = manager()
    compute(blocks, sequence_of(22))
    found = [blocks.find_prefix(sequence_of(length), length).num_tokens for length in (22, 21, 20, 17, 16, 8, 3)]
    assert found == [20, 20, 16, 16, 8, 0, 0]
    assert blocks.find_prefix(sequence_of(22, first=2), 22).num_tokens == 0


def test_the_snapshot_of_an_evicted_block_is_gone() -> None:
    blocks = manager()
    compute(blocks, sequence_of(22))
    assert blocks.states.num_snapshots == 3
    compute(blocks, sequence_of(32, first=50))
    assert blocks.find_prefix(sequence_of(22), 22).num_tokens == 0
    assert blocks.states.num_snapshots == 5, "those of the second prompt"


def branch(shared: int, first: int) -> Sequence:
    """A prompt with the first `shared` tokens of `sequence_of`, and ten others."""
    tokens = (*range(1, 1 + shared), *range(first, first + 10))
    return Sequence(SequenceGroup("r", tokens, SamplingParams(max_tokens=1)), 0, tokens)


@pytest.mark.parametrize("shared", [12, 14])
def test_a_snapshot_is_taken_where_prompts_part(shared: int) -> None:
    """The third prompt with a common beginning computes none of its full blocks again."""
    blocks = manager(num_blocks=40, num_slots=30)
    compute(blocks, sequence_of(22))
    second = branch(shared, 100)
    assert blocks.find_prefix(second, shared + 10).num_tokens == 8
    assert 12 in compute(blocks, second)
    third = branch(shared, 200)
    assert blocks.find_prefix(third, shared + 10).num_tokens == 12
    assert 12 not in compute(blocks, third)


def test_where_prompts_part_is_found_in_a_later_chunk() -> None:
    blocks = manager(num_blocks=40, num_slots=30)
    compute(blocks, sequence_of(38))
    one = branch(28, 100)
    blocks.start(one, blocks.find_prefix(one, 38), 38)
    assert one.num_stored == 24
    other = branch(28, 200)
    assert blocks.plan_snapshots(other, 0, 20, 38) == [], "they part in a later chunk"
    assert [at for at, _ in blocks.plan_snapshots(other, 20, 30, 38)] == [28]
    assert [at for at, _ in blocks.plan_snapshots(other, 30, 38, 38)] == [36, 32]


def test_a_pinned_prefix_keeps_its_last_snapshot() -> None:
    blocks, one = manager(num_slots=4), sequence_of(10)
    blocks.start(one, blocks.find_prefix(one, 10), 10)
    blocks.plan_snapshots(one, 0, 10, 10)
    one.num_computed = 10
    blocks.cache_full_blocks(one, 10)
    blocks.pin("system", one)
    blocks.free(one)
    compute(blocks, sequence_of(20, first=50))
    assert blocks.find_prefix(sequence_of(12), 12).num_tokens == 8
    blocks.check_integrity([])
