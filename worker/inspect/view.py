"""What a look at the engine shows: read in microseconds on the engine's thread, made into a `View` on any other.

`StepLog` notes what steps do while somebody looks. `read` copies what changes; everything that is work, such as finding
who shares which block, is `EngineCopy.view`.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import chain

import numpy as np

from quire.shared.messages import MAX_CHOICES
from quire.shared.views import (
    CACHED,
    MAX_CELLS,
    MAX_MOVES,
    MAX_ROWS,
    MAX_SEQUENCES,
    MAX_STEPS,
    MAX_TABLE_ENTRIES,
    NOBODY,
    PINNED,
    Cells,
    Move,
    Row,
    SequenceView,
    View,
    ViewLimits,
)
from quire.worker.engine.engine import Engine
from quire.worker.engine.step import Step

# So much of a request's id names it.
NAME_LENGTH = 8


class StepLog:
    """The observer of an engine: what its steps did since the last `take`. A microsecond or two for each step."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=MAX_STEPS)
        self._moves: deque[Move] = deque(maxlen=MAX_MOVES)
        self._num_moves = 0
        self._latest: Step | None = None

    def __call__(self, step: Step) -> None:
        """On the engine's thread, once a step is scheduled."""
        num_prefill = step.num_prefill_tokens
        if step.copies or step.swap_out or step.swap_in:
            for kind, copies in (("swap_out", step.swap_out), ("swap_in", step.swap_in), ("copy", step.copies)):
                self._moves.extend(Move(kind, *copy) for copy in copies)
                self._num_moves += len(copies)
        if num_prefill or step.decodes:
            self._steps.append((len(step.decodes), num_prefill))
            if num_prefill or self._latest is None or not self._latest.chunks:
                self._latest = step

    def take(self) -> RecentSteps:
        """On the engine's thread: what there is, and begin anew."""
        found = RecentSteps(tuple(self._steps), tuple(self._moves), self._num_moves - len(self._moves), self._latest)
        self._steps.clear()
        self._moves.clear()
        self._num_moves, self._latest = 0, None
        return found


@dataclass(frozen=True, slots=True)
class RecentSteps:
    """What steps did, and one of them to show."""

    steps: tuple[tuple[int, int], ...] = ()
    moves: tuple[Move, ...] = ()
    hidden_moves: int = 0
    shown: Step | None = None


@dataclass(frozen=True, slots=True)
class _SequenceCopy:
    """A sequence as it was."""

    request: str
    choice: int
    state: str
    priority: int
    prompt_tokens: int
    tokens: int
    filled: int
    table: list[int]
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class EngineCopy:
    """An engine between two steps; `cost_s` is what it took of the engine's thread."""

    limits: ViewLimits
    sequences: list[_SequenceCopy]
    known: list[int]
    pinned: list[tuple[list[int], int]]
    figures: dict[str, int]
    happened: RecentSteps
    cost_s: float

    def view(self, worker: str, number: int) -> View:
        """What is shown of it. Takes about a millisecond for thousands of blocks."""
        size, num_blocks = self.limits.block_size, self.limits.num_blocks
        held = [one for one in self.sequences if one.table]
        entries, filled_at = _columns([(one.table, one.filled) for one in held], size)
        _, known_at = _columns([(one.table, one.tokens) for one in held], size)
        pins, pins_at = _columns(self.pinned, size)
        owners = np.bincount(entries, minlength=num_blocks)
        filled, promised = (np.zeros(num_blocks, dtype=np.int64) for _ in range(2))
        for column, slots in ((filled, filled_at), (promised, known_at)):
            np.maximum.at(column, entries, slots)
            np.maximum.at(column, pins, pins_at)
        is_used = owners > 0
        is_used[pins] = True
        is_known, is_pinned = (np.zeros(num_blocks, dtype=np.bool_) for _ in range(2))
        is_known[self.known] = True
        is_pinned[pins] = True
        figures = {
            **self.figures,
            "blocks_pinned": int(is_pinned.sum()),
            "blocks_shared": int((owners > 1).sum()),
            "slots_filled": int(filled.sum()),
            "slots_promised": int(promised.sum() - filled.sum()),
            "slots_waste": int(is_used.sum()) * size - int(promised.sum()),
            "sharing_saved_blocks": len(entries) - int((owners > 0).sum()),
        }
        first = np.full(num_blocks, NOBODY, dtype=np.uint16)
        index = {id(one): at for at, one in enumerate(self.sequences[:MAX_SEQUENCES])}
        numbers = np.repeat(
            np.array([index.get(id(one), NOBODY) for one in held], dtype=np.uint16),
            np.array([len(one.table) for one in held], dtype=np.int64),
        )
        first[entries[::-1]] = numbers[::-1]  # where several have a block, the last that is written is the first owner
        filled[is_known & ~is_used] = size
        # What is in use goes before what is only cached.
        shown = np.concatenate((np.flatnonzero(is_used), np.flatnonzero(is_known & ~is_used)))
        ids = np.sort(shown[:MAX_CELLS])
        flags = CACHED * is_known[ids] + PINNED * is_pinned[ids]
        cells = Cells(
            ids.astype("<u4").tobytes(),
            first[ids].astype("<u2").tobytes(),
            np.minimum(owners[ids], 255).astype(np.uint8).tobytes(),
            filled[ids].astype(np.uint8).tobytes(),
            flags.astype(np.uint8).tobytes(),
        )
        batch = _rows(self.happened.shown)
        return View(
            worker,
            number,
            self.limits,
            figures,
            cells,
            len(shown) - len(ids),
            self._shown_sequences(),
            max(0, len(self.sequences) - MAX_SEQUENCES),
            tuple(batch[:MAX_ROWS]),
            max(0, len(batch) - MAX_ROWS),
            self.happened.steps,
            self.happened.moves,
            self.happened.hidden_moves,
        )

    def _shown_sequences(self) -> tuple[SequenceView, ...]:
        shown = self.sequences[:MAX_SEQUENCES]
        # Each may show so much of its table; what short ones leave over is not given to long ones.
        limit = MAX_TABLE_ENTRIES // max(1, len(shown))
        if sum(len(one.table) for one in shown) <= MAX_TABLE_ENTRIES:
            limit = MAX_TABLE_ENTRIES
        return tuple(
            SequenceView(
                one.request,
                one.choice,
                one.state,
                one.priority,
                one.prompt_tokens,
                one.tokens,
                one.filled,
                len(one.table),
                one.num_host_blocks,
                np.array(one.table[:limit], dtype="<u4").tobytes(),
            )
            for one in shown
        )


def read(engine: Engine, log: StepLog) -> EngineCopy:
    """The engine as it is. On its thread, between two steps."""
    started = time.thread_time()
    scheduler, limits = engine.scheduler, engine.limits
    blocks = scheduler.blocks
    sequences = [
        _SequenceCopy(
            group.request_id[:NAME_LENGTH],
            min(sequence.choice, MAX_CHOICES - 1),
            group.state.value,
            group.priority,
            sequence.num_prompt_tokens,
            len(sequence.token_ids),
            max(sequence.num_computed, sequence.num_stored),
            sequence.block_table.copy(),
            len(sequence.host_table),
        )
        for group in engine.groups.all_groups()
        for sequence in group.unfinished
    ]
    counters = blocks.counters
    states = [one.state for one in sequences]
    figures = {
        "blocks_used": blocks.num_blocks - blocks.num_free,
        "blocks_cached": blocks.num_cached,
        "blocks_free": blocks.num_free - blocks.num_cached,
        "host_blocks_used": blocks.num_host_blocks - blocks.num_free_host,
        "sequences_running": sum(1 for one in sequences if one.table),
        "sequences_waiting": states.count("waiting"),
        "sequences_swapped": states.count("swapped"),
        "forks": counters.forks,
        "copies": counters.copies,
        "swapped_out_blocks": counters.swapped_out,
        "swapped_in_blocks": counters.swapped_in,
        "evictions": counters.evictions,
        "prefix_query_tokens": counters.prefix_queries,
        "prefix_hit_tokens": counters.prefix_hits,
        "preemptions_recompute": engine.groups.counters.recomputed,
        "preemptions_swap": engine.groups.counters.swapped,
        "steps": engine.num_steps,
        "prefill_tokens": engine.num_prefill_tokens,
        "decode_tokens": engine.num_decode_tokens,
    }
    size = ViewLimits(
        limits.block_size,
        limits.num_blocks,
        limits.num_host_blocks,
        limits.max_model_len,
        limits.max_num_seqs,
        scheduler.max_num_batched_tokens,
    )
    pinned = [(prefix.blocks, prefix.num_tokens) for prefix in blocks.pinned]
    known, happened = blocks.known_blocks(), log.take()
    return EngineCopy(size, sequences, known, pinned, figures, happened, time.thread_time() - started)


def _columns(tables: list[tuple[list[int], int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The entries of all tables behind each other, and the slots of each that hold tokens."""
    lengths = np.array([len(table) for table, _ in tables], dtype=np.int64)
    count = int(lengths.sum())
    entries = np.fromiter(chain.from_iterable(table for table, _ in tables), dtype=np.int64, count=count)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    tokens = np.repeat(np.array([tokens for _, tokens in tables], dtype=np.int64), lengths)
    return entries, np.clip(tokens - (np.arange(count) - starts) * size, 0, size)


def _rows(step: Step | None) -> list[Row]:
    if step is None:
        return []
    rows = [Row(one.group.request_id[:NAME_LENGTH], one.choice, 1, False) for one in step.decodes.sequences]
    for chunk in step.chunks:
        one = chunk.sequence
        rows.append(Row(one.group.request_id[:NAME_LENGTH], one.choice, chunk.num_tokens, True))
    return rows
