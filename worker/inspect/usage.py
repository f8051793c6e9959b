"""What the engine holds between two steps, in numbers (`usage`) and block by block (`snapshot`). Reads, never changes.

    slots of the blocks in use:  | filled                    | promised              | waste               |
                                   K and V are in the cache    of tokens that are      of no token yet; less than
                                                               known, not computed     one block per sequence

Call both on the engine's thread. The work is linear in the entries of all block tables, and in C for the most of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from quire.worker.engine.engine import Engine
from quire.worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """A reading of the engine. Counters count from the start of the process, warm-up and pinned prefixes included."""

    block_size: int
    # Blocks of the device: total = used + cached + free. Pinned and shared ones are among the used.
    blocks_total: int
    blocks_used: int
    blocks_cached: int  # of no sequence, kept because the prefix cache may need them
    blocks_free: int
    blocks_pinned: int
    blocks_shared: int  # in the tables of two sequences or more
    # Slots of the used blocks.
    slots_filled: int
    slots_promised: int
    slots_waste: int
    # The most slots that are of no token yet in the table of a single sequence.
    slots_waste_max: int
    # Entries of all block tables beyond the distinct blocks in them, and as a share of the entries (paper section 6.3).
    sharing_saved_blocks: int
    sharing_saved_fraction: float
    host_blocks_total: int
    host_blocks_used: int
    host_blocks_free: int
    # Unfinished sequences by state; those that will fork from their group's leader count as one with it.
    sequences_running: int
    sequences_waiting: int
    sequences_swapped: int
    # Counters.
    forks: int
    copies: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    evictions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions_recompute: int
    preemptions_swap: int
    displaced: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    # Prompt tokens that the next step may take beside decodes.
    max_prefill_tokens: int


def usage(engine: Engine) -> EngineUsage:
    """A snapshot of the engine's memory and counters."""
    scheduler, groups = engine.scheduler, engine.groups
    blocks, counters, size = scheduler.blocks, scheduler.blocks.counters, engine.limits.block_size
    sequences = [sequence for group in groups.running for sequence in group.sequences if sequence.block_table]
    owners = Counter(chain.from_iterable(sequence.block_table for sequence in sequences))
    entries = sum(len(sequence.block_table) for sequence in sequences)
    pinned = {block for prefix in blocks.pinned for block in prefix.blocks}
    used = blocks.num_blocks - blocks.num_free
    pins = [(prefix.blocks, prefix.num_tokens) for prefix in blocks.pinned]
    filled = _slots([*((one.block_table, _num_filled(one)) for one in sequences), *pins], size)
    known = _slots([*((one.block_table, len(one.token_ids)) for one in sequences), *pins], size)
    return EngineUsage(
        block_size=size,
        blocks_total=blocks.num_blocks,
        blocks_used=used,
        blocks_cached=blocks.num_cached,
        blocks_free=blocks.num_free - blocks.num_cached,
        blocks_pinned=len(pinned),
        blocks_shared=sum(1 for count in owners.values() if count > 1),
        slots_filled=filled,
        slots_promised=known - filled,
        slots_waste=used * size - known,
        slots_waste_max=max((_num_empty(one, size) for one in sequences), default=0),
        sharing_saved_blocks=entries - len(owners),
        sharing_saved_fraction=(entries - len(owners)) / entries if entries else 0.0,
        host_blocks_total=blocks.num_host_blocks,
        host_blocks_used=blocks.num_host_blocks - blocks.num_free_host,
        host_blocks_free=blocks.num_free_host,
        sequences_running=len(sequences),
        sequences_waiting=sum(len(group.unfinished) for group in groups.all_waiting()),
        sequences_swapped=sum(len(group.unfinished) for group in groups.swapped),
        forks=counters.forks,
        copies=counters.copies,
        swapped_out_blocks=counters.swapped_out,
        swapped_in_blocks=counters.swapped_in,
        evictions=counters.evictions,
        prefix_query_tokens=counters.prefix_queries,
        prefix_hit_tokens=counters.prefix_hits,
        preemptions_recompute=groups.counters.recomputed,
        preemptions_swap=groups.counters.swapped,
        displaced=groups.counters.for_higher_class,
        steps=engine.num_steps,
        prefill_tokens=engine.num_prefill_tokens,
        decode_tokens=engine.num_decode_tokens,
        max_prefill_tokens=min(scheduler.max_prefill_tokens, scheduler.max_num_batched_tokens),
    )


@dataclass(frozen=True, slots=True)
class _Tables:
    """A sequence as it was: copies of what changes."""

    request_id: str
    choice: int
    state: str
    priority: int
    num_tokens: int
    num_computed: int
    num_filled: int
    block_table: list[int]
    host_table: list[int]


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """All that `/debug/blocks` shows, taken at one moment. Rendering it takes longer, and may happen on any thread."""

    usage: EngineUsage
    refs: list[int]
    known: set[int]  # what the prefix cache can find: full blocks, in use or not
    pinned: list[tuple[list[int], int]]  # blocks and tokens of each pinned prefix
    sequences: list[_Tables]

    def render(self) -> dict[str, Any]:
        """Every block that is not free, with its owners, and every sequence with its tables. JSON can hold it."""
        size = self.usage.block_size
        owners: dict[int, list[str]] = {}
        filled: dict[int, int] = {}
        for one in self.sequences:
            name = f"{one.request_id}/{one.choice}"
            for block, slots in _by_block(one.block_table, one.num_filled, size):
                owners.setdefault(block, []).append(name)
                filled[block] = max(slots, filled.get(block, 0))
        for table, num_tokens in self.pinned:
            for block, slots in _by_block(table, num_tokens, size):
                filled[block] = max(slots, filled.get(block, 0))
        pinned = {block for table, _ in self.pinned for block in table}
        return {
            "block_size": size,
            "num_blocks": self.usage.blocks_total,
            "num_free": self.usage.blocks_free,
            "blocks": [
                {
                    "id": block,
                    "refs": self.refs[block],
                    "filled": filled.get(block, size),
                    "sequences": owners.get(block, []),
                    "shared": len(owners.get(block, ())) > 1,
                    "cached": block in self.known,
                    "pinned": block in pinned,
                }
                for block in sorted({*owners, *pinned, *self.known})
            ],
            "sequences": [
                {
                    "request": one.request_id,
                    "choice": one.choice,
                    "state": one.state,
                    "priority": one.priority,
                    "tokens": one.num_tokens,
                    "computed": one.num_computed,
                    "blocks": one.block_table,
                    "host_blocks": one.host_table,
                }
                for one in self.sequences
            ],
            "usage": asdict(self.usage),
        }


def snapshot(engine: Engine) -> BlockSnapshot:
    """The tables of all unfinished sequences, and who owns which block."""
    blocks = engine.scheduler.blocks
    sequences = [
        _Tables(
            group.request_id,
            sequence.choice,
            group.state.value,
            group.priority,
            len(sequence.token_ids),
            sequence.num_computed,
            _num_filled(sequence),
            sequence.block_table.copy(),
            sequence.host_table.copy(),
        )
        for group in engine.groups.all_groups()
        for sequence in group.unfinished
    ]
    pinned = [(prefix.blocks, prefix.num_tokens) for prefix in blocks.pinned]
    return BlockSnapshot(usage(engine), blocks.ref_counts.copy(), blocks.known(), pinned, sequences)


def _num_filled(sequence: Sequence) -> int:
    """Tokens of the sequence whose K and V are in its blocks."""
    return max(sequence.num_computed, sequence.num_stored)


def _num_empty(sequence: Sequence, size: int) -> int:
    # The block for the newest token is taken when it is computed: there may be a token more than slots.
    return max(0, len(sequence.block_table) * size - len(sequence.token_ids))


def _slots(tables: Iterable[tuple[list[int], int]], size: int) -> int:
    """Slots that hold tokens, in blocks that are counted once; `tables` are block tables with their tokens."""
    full: set[int] = set()
    parts: dict[int, int] = {}
    for table, num_tokens in tables:
        whole, rest = divmod(num_tokens, size)
        full.update(table[:whole])
        if rest and whole < len(table):
            parts[table[whole]] = max(rest, parts.get(table[whole], 0))
    return size * len(full) + sum(slots for block, slots in parts.items() if block not in full)


def _by_block(table: list[int], num_tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """Each block of a table with the slots of it that are filled."""
    for index, block in enumerate(table):
        yield block, min(size, max(0, num_tokens - index * size))
