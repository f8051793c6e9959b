"""The `View` of an engine that gateways show at `/engine`: a snapshot and the recent steps, cut to a bounded size."""

from __future__ import annotations

import numpy as np

from quire.shared.protocol.messages import MAX_CHOICES
from quire.shared.protocol.views import (
    CACHED,
    FIGURES,
    MAX_CELLS,
    MAX_SEQUENCES,
    MAX_TABLE_ENTRIES,
    NOBODY,
    PINNED,
    Cells,
    Member,
    SequenceView,
    View,
    ViewLimits,
)
from quire.worker.inspect.snapshot import BlockColumns, Snapshot
from quire.worker.inspect.step_log import RecentSteps

# A view names a request by this many characters of its id, and at most this many of the number of its prompt (`-12`).
NAME_LENGTH, INDEX_LENGTH = 8, 4


def name_of(request_id: str) -> str:
    """Return the name of a request in views. The requests of one call, one for each prompt, have different names."""
    beginning, dash, index = request_id.partition("-")
    return beginning[:NAME_LENGTH] + (dash + index)[:INDEX_LENGTH]


def make_view(snapshot: Snapshot, recent: RecentSteps, worker: str, number: int) -> View:
    """Return view number `number` of a worker. Takes about a millisecond for thousands of blocks."""
    cells, hidden_cells = _cells(snapshot.columns)
    limits, usage = snapshot.limits, snapshot.usage()
    members, steps, hidden_steps = recent.render()
    return View(
        worker=worker,
        number=number,
        limits=ViewLimits(
            limits.block_size,
            limits.num_blocks,
            limits.num_host_blocks,
            limits.max_model_len,
            limits.max_num_seqs,
            snapshot.max_num_batched_tokens,
        ),
        figures={name: getattr(usage, name) for name in FIGURES},
        cells=cells,
        hidden_cells=hidden_cells,
        sequences=_sequences(snapshot),
        hidden_sequences=max(0, len(snapshot.sequences) - MAX_SEQUENCES),
        members=tuple(
            Member(
                name_of(sequence.group.request_id), min(sequence.choice, MAX_CHOICES - 1), sequence.num_prompt_tokens
            )
            for sequence in members
        ),
        steps=steps,
        hidden_steps=hidden_steps,
    )


def _cells(columns: BlockColumns) -> tuple[Cells, int]:
    """Return the blocks that are not free, and how many of them are left out, cached ones first."""
    cached = columns.is_cached & ~columns.is_used
    blocks = np.concatenate((np.flatnonzero(columns.is_used), np.flatnonzero(cached)))
    ids = np.sort(blocks[:MAX_CELLS])
    owners = columns.first_owner[ids]
    cells = Cells(
        ids.astype("<u4").tobytes(),
        np.where((owners >= 0) & (owners < MAX_SEQUENCES), owners, NOBODY).astype("<u2").tobytes(),
        np.minimum(columns.num_owners[ids], 255).astype(np.uint8).tobytes(),
        columns.num_filled[ids].astype(np.uint8).tobytes(),
        (CACHED * columns.is_cached[ids] + PINNED * columns.is_pinned[ids]).astype(np.uint8).tobytes(),
    )
    return cells, len(blocks) - len(ids)


def _sequences(snapshot: Snapshot) -> tuple[SequenceView, ...]:
    shown = snapshot.sequences[:MAX_SEQUENCES]
    # If the tables are too long together, each is cut to an equal share; space that short tables leave is not used.
    limit = MAX_TABLE_ENTRIES
    if sum(len(sequence.block_table) for sequence in shown) > limit:
        limit //= len(shown)
    return tuple(
        SequenceView(
            name_of(sequence.request_id),
            min(sequence.choice, MAX_CHOICES - 1),
            sequence.state,
            sequence.priority,
            sequence.num_prompt_tokens,
            sequence.num_tokens,
            sequence.num_filled,
            len(sequence.block_table),
            len(sequence.host_table),
            np.array(sequence.block_table[:limit], dtype="<u4").tobytes(),
        )
        for sequence in shown
    )
