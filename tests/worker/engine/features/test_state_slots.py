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
