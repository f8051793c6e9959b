"""Blocks with snapshots of states: a prefix ends where it has one, and a snapshot goes with its block."""

from __future__ import annotations

import pytest

from quire.shared.messages import SamplingParams
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.state_slots import SlotCopy, SlotError, StateSlots
from quire.worker.engine.stateful_blocks import StatefulBlockManager


def manager(num_slots: int = 10, num_blocks: int = 8, **options: bool) -> StatefulBlockManager:
    """Blocks of 4 tokens, two rows, and a snapshot every 8 tokens."""
    return StatefulBlockManager(num_blocks, 4, states=StateSlots(2, num_slots, 8), **options)


def sequence(length: int, first: int = 1) -> Sequence:
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
    assert compute(manager(), sequence(22)) == [20, 16, 8]
    assert compute(manager(), sequence(20)) == [20, 16, 8], "an equal prompt can use the one after 16 tokens"
    assert compute(manager(), sequence(3)) == []
    assert compute(manager(prefix_caching=False), sequence(22)) == []


def test_if_slots_are_short_the_last_snapshots_are_taken() -> None:
    assert compute(manager(num_slots=4), sequence(22)) == [20, 16]
    assert compute(manager(num_slots=2), sequence(22)) == []


def test_a_prefix_ends_at_its_last_snapshot_and_leaves_a_token_to_compute() -> None:
    blocks = manager()
    compute(blocks, sequence(22))
    found = [blocks.find_prefix(sequence(length), length).num_tokens for length in (22, 21, 20, 17, 16, 8, 3)]
    assert found == [20, 20, 16, 16, 8, 0, 0]
    assert blocks.find_prefix(sequence(22, first=2), 22).num_tokens == 0


def test_a_snapshot_is_copied_to_the_row_of_the_sequence() -> None:
    blocks, one = manager(), sequence(22)
    compute(blocks, sequence(22))
    prefix = blocks.find_prefix(one, 22)
    one.row = 1
    blocks.restore_state(one, prefix)
    copies = blocks.states.take_copies()
    assert [copy.target for copy in copies] == [1]
    assert copies == [SlotCopy(blocks.states.find(blocks._hash(one, 4)) or 0, 1)]
    blocks.restore_state(one, blocks.find_prefix(one, 3))
    assert blocks.states.take_copies() == []


def test_the_snapshot_of_an_evicted_block_is_gone() -> None:
    blocks = manager()
    compute(blocks, sequence(22))
    assert blocks.states.num_snapshots == 3
    compute(blocks, sequence(32, first=50))
    assert blocks.find_prefix(sequence(22), 22).num_tokens == 0
    assert blocks.states.num_snapshots == 5, "those of the second prompt"


def test_a_snapshot_is_not_taken_twice() -> None:
    blocks = manager(num_blocks=20)
    compute(blocks, sequence(22))
    assert compute(blocks, sequence(22)) == []
    assert compute(blocks, sequence(30)) == [28, 24]


def branch(shared: int, first: int) -> Sequence:
    """A prompt with the first `shared` tokens of `sequence`, and ten others."""
    tokens = (*range(1, 1 + shared), *range(first, first + 10))
    return Sequence(SequenceGroup("r", tokens, SamplingParams(max_tokens=1)), 0, tokens)


@pytest.mark.parametrize("shared", [12, 14])
def test_a_snapshot_is_taken_where_prompts_part(shared: int) -> None:
    """The third prompt with a common beginning computes none of its full blocks again."""
    blocks = manager(num_blocks=40, num_slots=30)
    compute(blocks, sequence(22))
    second = branch(shared, 100)
    assert blocks.find_prefix(second, shared + 10).num_tokens == 8
    assert 12 in compute(blocks, second)
    third = branch(shared, 200)
    assert blocks.find_prefix(third, shared + 10).num_tokens == 12
    assert 12 not in compute(blocks, third)


def test_where_prompts_part_is_found_in_a_later_chunk() -> None:
    blocks = manager(num_blocks=40, num_slots=30)
    compute(blocks, sequence(38))
    one = branch(28, 100)
    blocks.start(one, blocks.find_prefix(one, 38), 38)
    assert one.num_stored == 24
    other = branch(28, 200)
    assert blocks.plan_snapshots(other, 0, 20, 38) == [], "they part in a later chunk"
    assert [at for at, _ in blocks.plan_snapshots(other, 20, 30, 38)] == [28]
    assert [at for at, _ in blocks.plan_snapshots(other, 30, 38, 38)] == [36, 32]


def test_a_pinned_prefix_keeps_its_last_snapshot() -> None:
    blocks, one = manager(num_slots=4), sequence(10)
    blocks.start(one, blocks.find_prefix(one, 10), 10)
    blocks.plan_snapshots(one, 0, 10, 10)
    one.num_computed = 10
    blocks.cache_full_blocks(one, 10)
    blocks.pin("system", one)
    blocks.free(one)
    compute(blocks, sequence(20, first=50))
    assert blocks.find_prefix(sequence(12), 12).num_tokens == 8
    blocks.check_integrity([])


def test_a_slot_that_leaks_is_found() -> None:
    blocks = manager()
    blocks.states.take()
    with pytest.raises(SlotError, match="do not add up"):
        blocks.check_integrity([])
