"""A snapshot of the engine between two steps. `/metrics`, `/debug/blocks` and `/engine` are all made from it.

    slots of the used blocks:  | filled                     | promised                 | waste                  |
                                 hold keys and values         belong to known tokens     belong to no token yet
                                                              not computed yet

`take_snapshot` runs on the engine's thread, where it copies what changes and computes nothing. Everything that takes
time, such as counting the owners of each block, is a method of the snapshot and may run on any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.shared.protocol.views import EngineFigures
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.pins import PinCounters
from quire.worker.engine.image_counters import ImageCounters
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.speculation import DraftCounters
from quire.worker.engine.spill import SpillFigures

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# Figures of models with recurrent states; 0 for other models.
STATE_FIGURES = ("state_snapshots", "state_slots_free", "state_slots_held", "states_restored", "state_evictions")
# Figures of an engine that does not speculate.
NO_DRAFTS = DraftCounters().figures()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUsage(EngineFigures):
    """All figures of an engine: those that a view shows, and those that only operators see."""

    block_size: int
    blocks_total: int
    # The most slots without a token in the block table of a single sequence.
    slots_waste_max: int
    # `sharing_saved_blocks` as a share of the entries of all block tables (paper section 6.3).
    sharing_saved_fraction: float
    host_blocks_total: int
    host_blocks_free: int
    # Preemptions of a request by one of a higher priority class.
    displaced: int
    # Steps of batch lines that ended early for a request of a higher class.
    interrupted_steps: int
    # Prompt tokens that the next step may compute besides decodes.
    max_prefill_tokens: int
    # Slots of recurrent states besides those of running sequences: snapshots that the prefix cache can use, free ones,
    # and the rest, which sequences hold. Sequences that began with a snapshot, and snapshots evicted for their slots.
    state_snapshots: int
    state_slots_free: int
    state_slots_held: int
    states_restored: int
    state_evictions: int
    # Drafted tokens that steps have computed, and those among them that were accepted, by the source of the draft.
    drafted_tokens: Mapping[str, int]
    accepted_tokens: Mapping[str, int]
    # Blocks that the prefix cache has evicted.
    spill: SpillFigures
    images: ImageCounters
    # Blocks that calls have pinned, now and since the start.
    cache_pin_blocks: int
    cache_pins: PinCounters


class SequenceSnapshot(NamedTuple):
    """An unfinished sequence, with copies of its tables."""

    request_id: str
    choice: int
    state: str
    priority: int
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int
    num_filled: int  # tokens whose keys and values are in the blocks
    block_table: list[int]
    host_table: list[int]


class PinnedBlocks(NamedTuple):
    """The blocks of a pinned prefix."""

    block_table: list[int]
    num_tokens: int


class BlockColumns(NamedTuple):
    """The owners and the filled slots of each block: arrays [num_blocks]."""

    num_owners: Integers  # sequences with the block in their tables
    first_owner: Integers  # index of the first of these sequences; -1 for none
    num_filled: Integers  # slots with keys and values
    num_known: Integers  # slots that belong to a token, computed or not
    is_used: Flags  # in a block table, or pinned
    is_pinned: Flags
    is_cached: Flags  # the prefix cache finds it, in use or not


@dataclass(frozen=True)
class Snapshot:
    """An engine between two steps."""

    limits: EngineLimits
    max_num_batched_tokens: int
    sequences: list[SequenceSnapshot]
    pinned: list[PinnedBlocks]
    cached_blocks: list[int]
    call_pins: list[int]  # blocks that calls have pinned
    counts: dict[str, Any]  # fields of EngineUsage that the engine keeps itself

    def usage(self) -> EngineUsage:
        """Return all figures. Takes about a millisecond for thousands of blocks."""
        columns, size = self.columns, self.limits.block_size
        held = [sequence for sequence in self.sequences if sequence.block_table]
        states = [sequence.state for sequence in self.sequences]
        entries, distinct = int(columns.num_owners.sum()), int(np.count_nonzero(columns.num_owners))
        filled, known = int(columns.num_filled[columns.is_used].sum()), int(columns.num_known.sum())
        return EngineUsage(
            **self.counts,
            block_size=size,
            blocks_total=self.limits.num_blocks,
            blocks_pinned=int(columns.is_pinned.sum()),
            cache_pin_blocks=len(self.call_pins),
            blocks_shared=int((columns.num_owners > 1).sum()),
            slots_filled=filled,
            slots_promised=known - filled,
            slots_waste=int(columns.is_used.sum()) * size - known,
            # The block of the newest token is allocated when it is computed, so tokens can exceed slots by one.
            slots_waste_max=max(
                (max(0, len(sequence.block_table) * size - sequence.num_tokens) for sequence in held), default=0
            ),
            sharing_saved_blocks=entries - distinct,
            sharing_saved_fraction=(entries - distinct) / entries if entries else 0.0,
            host_blocks_total=self.limits.num_host_blocks,
            sequences_running=len(held),
            sequences_waiting=states.count("waiting"),
            sequences_swapped=states.count("swapped"),
        )

    @cached_property
    def columns(self) -> BlockColumns:
        """Every block with its owners and slots."""
        num_blocks, size = self.limits.num_blocks, self.limits.block_size
        tables = [sequence.block_table for sequence in self.sequences]
        entries, filled = _slots(tables, [sequence.num_filled for sequence in self.sequences], size)
        _, known = _slots(tables, [sequence.num_tokens for sequence in self.sequences], size)
        pins, pins_filled = _slots(
            [prefix.block_table for prefix in self.pinned], [prefix.num_tokens for prefix in self.pinned], size
        )

        num_owners = np.bincount(entries, minlength=num_blocks)
        first_owner = np.full(num_blocks, -1)
        owners = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        first_owner[entries[::-1]] = owners[::-1]  # of several values for one index numpy keeps the last

        num_filled, num_known = np.zeros(num_blocks, dtype=np.int64), np.zeros(num_blocks, dtype=np.int64)
        for column, slots in ((num_filled, filled), (num_known, known)):
            np.maximum.at(column, entries, slots)  # owners of a block may have computed different shares of it
            np.maximum.at(column, pins, pins_filled)

        is_pinned, is_cached = np.zeros(num_blocks, dtype=np.bool_), np.zeros(num_blocks, dtype=np.bool_)
        is_pinned[pins] = True
        is_cached[self.cached_blocks] = True
        is_used = is_pinned | (num_owners > 0)
        num_filled[is_cached & ~is_used] = size
        return BlockColumns(num_owners, first_owner, num_filled, num_known, is_used, is_pinned, is_cached)


def take_snapshot(engine: Engine) -> Snapshot:
    """Copy the tables of all unfinished sequences, and read the counters. Call it on the engine's thread."""
    scheduler, blocks = engine.scheduler, engine.scheduler.blocks
    return Snapshot(
        engine.limits,
        scheduler.max_num_batched_tokens,
        [
            SequenceSnapshot(
                group.request_id,
                sequence.choice,
                group.state.value,
                group.priority,
                sequence.num_prompt_tokens,
                len(sequence.token_ids),
                sequence.num_computed,
                max(sequence.num_computed, sequence.num_stored),
                sequence.block_table.copy(),
                sequence.host_table.copy(),
            )
            for group in engine.groups.all_groups()
            for sequence in group.unfinished
        ],
        [PinnedBlocks(prefix.blocks, prefix.num_tokens) for prefix in blocks.pinned],
        blocks.known_blocks(),
        blocks.cached.pinned(),
        {
            "blocks_used": blocks.num_blocks - blocks.num_free,
            "blocks_cached": blocks.num_cached,
            "blocks_free": blocks.num_free - blocks.num_cached,
            "host_blocks_used": blocks.num_host_blocks - blocks.num_free_host,
            "host_blocks_free": blocks.num_free_host,
            "forks": blocks.counters.forks,
            "copies": blocks.counters.copies,
            "swapped_out_blocks": blocks.counters.swapped_out,
            "swapped_in_blocks": blocks.counters.swapped_in,
            "evictions": blocks.counters.evictions,
            "prefix_query_tokens": blocks.counters.prefix_queries,
            "prefix_hit_tokens": blocks.counters.prefix_hits,
            "preemptions_recompute": engine.groups.counters.recomputed,
            "preemptions_swap": engine.groups.counters.swapped,
            "displaced": engine.groups.counters.for_higher_class,
            "steps": engine.num_steps,
            "interrupted_steps": engine.num_interrupted_steps,
            "prefill_tokens": engine.num_prefill_tokens,
            "decode_tokens": engine.num_decode_tokens,
            "max_prefill_tokens": min(scheduler.max_prefill_tokens, scheduler.max_num_batched_tokens),
            **(engine.groups.states.figures() if engine.groups.states else dict.fromkeys(STATE_FIGURES, 0)),
            "spill": scheduler.spill.figures() if scheduler.spill else SpillFigures(),
            "cache_pins": replace(blocks.cached.counters),
            "images": replace(engine.images.counters) if engine.images else ImageCounters(),
            **(engine.drafts.counters.figures() if engine.drafts else NO_DRAFTS),
        },
    )


def _slots(tables: Items[list[int]], num_tokens: Items[int], size: int) -> tuple[Integers, Integers]:
    """Return all entries of the tables, one table after the other, and how many slots of each hold tokens."""
    lengths = np.array([len(table) for table in tables], dtype=np.int64)
    count = int(lengths.sum())
    entries = np.fromiter(chain.from_iterable(tables), dtype=np.int64, count=count)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    tokens = np.repeat(np.array(num_tokens, dtype=np.int64), lengths)
    return entries, np.clip(tokens - (np.arange(count) - starts) * size, 0, size)
