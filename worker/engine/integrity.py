"""What always holds of an engine's bookkeeping, checked: after every step in tests, never while serving."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.worker.engine.sequence import PENDING, GroupState, Sequence

if TYPE_CHECKING:
    from quire.worker.engine.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise BlockError or AssertionError unless groups, rows and blocks agree."""
    rows, groups = scheduler.rows, scheduler.all_groups()
    assert len({id(group) for group in groups}) == len(groups), "a group is in two places"
    sequences = [sequence for group in groups for sequence in group.sequences]
    scheduler.blocks.check_integrity(sequences)
    taken = [sequence.row for sequence in sequences if sequence.row >= 0]
    assert sorted(taken + rows._free) == list(range(scheduler.limits.max_num_seqs)), "rows leak"
    assert rows.num_reserved == sum(group.num_reserved_rows for group in groups), "kept rows leak"
    assert rows.num_free >= 0, "more rows are kept than there are"
    for group in (*scheduler.swapped, *scheduler.all_waiting()):
        assert all(sequence.row < 0 and not sequence.block_table for sequence in group.sequences), "blocks kept"
    for group in scheduler.running:
        assert group.state is GroupState.RUNNING
        assert group.num_reserved_rows == 0 or not group.is_forked or group.sampling.beam_width
        for sequence in group.sequences:
            if sequence.row >= 0:
                _check_row(scheduler, sequence)
    for line in (scheduler.running, scheduler.swapped, *scheduler.waiting):
        orders = [group.order for group in line]
        assert orders == sorted(orders), "not in order"


def _check_row(scheduler: Scheduler, sequence: Sequence) -> None:
    row, rows, size = sequence.row, scheduler.rows, scheduler.limits.block_size
    waste = len(sequence.block_table) * size - len(sequence.token_ids)
    assert waste < size, f"{sequence} holds an empty block"
    assert rows.block_tables[row, : len(sequence.block_table)].tolist() == sequence.block_table, sequence
    assert rows.lengths[row] == len(sequence.token_ids)
    assert rows.capacities[row] == len(sequence.block_table) * size
    assert rows.last_tokens[row] in (sequence.token_ids[-1], PENDING)
    if sequence.is_decoding:
        index = sequence.num_computed // size
        if index < len(sequence.block_table) and scheduler.blocks.ref_counts[sequence.block_table[index]] > 1:
            assert rows.shares_tail[row], f"{sequence} would write into a block of others"
