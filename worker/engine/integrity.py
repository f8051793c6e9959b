"""Invariants of an engine's bookkeeping. Tests check them after every step; a serving engine does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.worker.engine.sequence import PENDING, GroupState, Sequence

if TYPE_CHECKING:
    from quire.worker.engine.groups import Groups


def check_groups(groups: Groups) -> None:
    """Raise BlockError or AssertionError unless groups, rows and blocks agree."""
    batch, every = groups.input_batch, groups.all_groups()
    assert len({id(group) for group in every}) == len(every), "a group is in two places"
    sequences = [sequence for group in every for sequence in group.sequences]
    groups.blocks.check_integrity(sequences)
    taken = [sequence.row for sequence in sequences if sequence.row >= 0]
    assert sorted(taken + batch._free) == list(range(groups.limits.max_num_seqs)), "rows leak"
    assert batch.num_reserved == sum(group.num_reserved_rows for group in every), "reserved rows leak"
    assert batch.num_free >= 0, "more rows are reserved than there are"
    for group in (*groups.swapped, *groups.all_waiting()):
        assert all(sequence.row < 0 and not sequence.block_table for sequence in group.sequences), "blocks leak"
    for group in groups.running:
        assert group.state is GroupState.RUNNING
        assert group.num_reserved_rows == 0 or not group.is_forked or group.sampling.beam_width
        for sequence in group.sequences:
            if sequence.row >= 0:
                _check_row(groups, sequence)
    for queue in (groups.running, groups.swapped, *groups.waiting):
        orders = [group.order for group in queue]
        assert orders == sorted(orders), "not in order"


def _check_row(groups: Groups, sequence: Sequence) -> None:
    row, batch, size = sequence.row, groups.input_batch, groups.limits.block_size
    internal_fragmentation = len(sequence.block_table) * size - len(sequence.token_ids)
    assert internal_fragmentation < size, f"{sequence} holds an empty block"
    table = batch.block_tables[row, : len(sequence.block_table)].tolist()
    assert table == sequence.block_table, f"{sequence} has another table in its row"
    assert batch.lengths[row] == len(sequence.token_ids), f"{sequence} has another length in its row"
    assert batch.capacities[row] == len(table) * size, f"{sequence} has another capacity in its row"
    assert batch.last_tokens[row] in (sequence.token_ids[-1], PENDING), f"{sequence} has another token in its row"
    if sequence.is_decoding:
        index = sequence.num_computed // size
        if index < len(sequence.block_table) and groups.blocks.ref_counts[sequence.block_table[index]] > 1:
            assert batch.shares_tail[row], f"{sequence} would write to a shared block"
