"""A log of the engine's steps since the last view: the sequences in each, and the blocks that it moved.

It lets a viewer go through steps one by one, of which a small model computes some fifty between two views. The log runs
on the engine's thread and keeps what changes; `RecentSteps.render` may run on any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from quire.shared.protocol.views import (
    MAX_MEMBERS,
    MAX_MOVES,
    MAX_ROWS,
    MAX_STEP_ENTRIES,
    MAX_STEPS,
    Move,
    Row,
    StepView,
)
from quire.worker.engine.blocks import Copy
from quire.worker.engine.groups import Groups
from quire.worker.engine.sequence import Sequence
from quire.worker.engine.step import Step, Verification

# A step with more sequences is told only if it is the latest one: copying it would cost too much.
MAX_TOLD = 16
# Blocks of a table that are told.
MAX_TABLE = 256


class _Entry(NamedTuple):
    """A sequence in a step. blocks: those of its table from number `start` on; before them nothing has changed."""

    sequence: Sequence
    kind: str
    tokens: int
    filled: int
    computed: int
    verification: Verification | None
    start: int
    blocks: list[int]


class _Told(NamedTuple):
    """A step with its moves by kind."""

    entries: list[_Entry]
    moves: tuple[tuple[str, list[Copy]], ...]


@dataclass(frozen=True, slots=True)
class RecentSteps:
    """The steps since the last view. count: how many there were, with those that were not noted."""

    steps: tuple[_Told, ...] = ()
    count: int = 0

    def render(self) -> tuple[list[Sequence], tuple[StepView, ...], int]:
        """Return the sequences, the steps, whose rows name sequences by index, and how many steps are left out.

        The latest steps are kept if there is too much.
        """
        room = [MAX_STEPS, MAX_ROWS, MAX_STEP_ENTRIES, MAX_MOVES, MAX_MEMBERS]
        members: dict[Sequence, int] = {}
        kept = 0
        for entries, moves in reversed(self.steps):
            blocks, num_moves = sum(len(entry.blocks) for entry in entries), sum(len(copies) for _, copies in moves)
            new = sum(entry.sequence not in members for entry in entries)
            room = [left - taken for left, taken in zip(room, (1, len(entries), blocks, num_moves, new), strict=True)]
            if min(room) < 0:
                break
            for entry in entries:
                members.setdefault(entry.sequence, len(members))
            kept += 1
        # Tables of which an earlier step, left out here, told the beginning.
        tables: dict[Sequence, list[int]] = {}
        for told in self.steps[: len(self.steps) - kept]:
            for entry in told.entries:
                tables[entry.sequence] = tables.get(entry.sequence, [])[: entry.start] + entry.blocks
        views = tuple(_view(told, members, tables) for told in self.steps[len(self.steps) - kept :])
        if sum(len(row.table) for view in views for row in view.rows) > 4 * MAX_STEP_ENTRIES:
            return [], (), self.count
        return list(members), views, self.count - kept


def _view(told: _Told, members: dict[Sequence, int], tables: dict[Sequence, list[int]]) -> StepView:
    """Render a step. The tables are those before it; they are told as a whole, and removed."""
    rows = []
    for sequence, kind, tokens, filled, computed, verification, start, blocks in told.entries:
        accepted = verification.accepted if verification else 0
        if (before := tables.pop(sequence, None)) is not None:
            start, blocks = 0, before[:start] + blocks
        table = np.array(blocks, dtype="<u4").tobytes()
        filled += accepted
        rows.append(Row(members[sequence], kind, max(tokens, filled), filled, computed, accepted, start, table))
    return StepView(tuple(rows), tuple(Move(kind, *copy) for kind, copies in told.moves for copy in copies))


class StepLog:
    """An observer of the engine's steps, at a cost of 5 to 30 microseconds per step. Use it on the engine's thread.

    groups: all unfinished groups of the engine.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._steps: deque[_Told] = deque(maxlen=MAX_STEPS)
        # The table of each sequence as it was told: the list itself, its length then, and its last block.
        self._tables: dict[Sequence, tuple[list[int], int, int]] = {}
        self._count = 0
        self._latest: Step | None = None

    def __call__(self, step: Step) -> None:
        """Note a step that has been scheduled."""
        moves: tuple[tuple[str, list[Copy]], ...] = ()
        if step.copies or step.swap_out or step.swap_in:
            found = (("swap_out", step.swap_out), ("swap_in", step.swap_in), ("copy", step.copies))
            moves = tuple((kind, copies[:MAX_MOVES]) for kind, copies in found if copies)
        elif not step.num_tokens:
            return
        self._count += 1
        if len(step.decodes) + len(step.verifications) + len(step.chunks) > MAX_TOLD:
            self._latest = step
            return
        self._latest = None
        self._steps.append(_Told(self._entries(step), moves))

    def take(self) -> RecentSteps:
        """Return the steps since the last call, and clear the log."""
        if self._latest is not None:
            # Without tables: they would be long, and those of the view itself are as new.
            entries = [entry._replace(start=0, blocks=[]) for entry in self._entries(self._latest)]
            self._steps.append(_Told(entries, ()))
        recent = RecentSteps(tuple(self._steps), self._count)
        self._steps.clear()
        self._tables = {}
        self._count, self._latest = 0, None
        return recent

    def _entries(self, step: Step) -> list[_Entry]:
        change, entries = self._change, []
        for sequence in step.decodes.sequences:
            tokens = len(sequence.token_ids)
            entries.append(_Entry(sequence, "decode", tokens, tokens, 1, None, *change(sequence)))
        for one in step.verifications:
            tokens = len(one.sequence.token_ids)
            entries.append(_Entry(one.sequence, "decode", tokens, tokens, one.num_tokens, one, *change(one.sequence)))
        for chunk in step.chunks:
            sequence, computed = chunk.sequence, chunk.num_tokens
            filled, tokens = sequence.num_computed + computed, len(sequence.token_ids)
            entries.append(_Entry(sequence, "prefill", tokens, filled, computed, None, *change(sequence)))
        groups = self._groups
        if groups.num_running > len(entries):  # some run that the step leaves out, or will fork
            known = {entry.sequence for entry in entries}
            held = (sequence for group in groups.running for sequence in group.unfinished if sequence not in known)
            entries += self._idle("held", (sequence for sequence in held if sequence.block_table))
        for kind, found in (("swapped", groups.swapped), ("waiting", groups.all_waiting())):
            entries += self._idle(kind, chain.from_iterable(group.unfinished for group in found))
            if len(entries) > MAX_MEMBERS:
                break
        return entries[:MAX_MEMBERS]

    def _idle(self, kind: str, sequences: Iterable[Sequence]) -> list[_Entry]:
        """Return entries of sequences of which the step computes nothing."""
        return [
            _Entry(one, kind, len(one.token_ids), one.num_computed, 0, None, *self._change(one)) for one in sequences
        ]

    def _change(self, sequence: Sequence) -> tuple[int, list[int]]:
        """Return from where on the table of a sequence has changed since it was told last, and its blocks from there.

        The last block may be replaced by its copy. A table of which other blocks change is a new list.
        """
        table = sequence.block_table
        length = len(table)
        known = self._tables.get(sequence)
        if known is None or known[0] is not table or known[1] > length:
            start = 0
        elif known[1] == length and (not length or known[2] == table[-1]):
            return length, []
        else:
            start = max(0, known[1] - 1)
        self._tables[sequence] = (table, length, table[-1] if length else -1)
        return start, table[start:MAX_TABLE]
