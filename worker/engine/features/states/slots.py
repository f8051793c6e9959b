"""Slots for the recurrent states of sequences: which slot holds what. Bookkeeping without tensors.

A model with recurrent layers keeps one state of fixed size per sequence, in a slot of a pool
(`quire.worker.models.transformers.state_pool`). The slot of a running sequence is the row that it has in the input
batch, so that admission counts both at once. The slots above the rows hold copies:

    snapshot    the state at the end of a full block that the prefix cache knows, found by the hash of that block;
                evicted when a slot is needed, least recently used first, or together with its block
    held        a snapshot of a sequence whose block the prefix cache does not know yet
    parked      the state of a sequence that is swapped out

Copies of slots are done in the order in which they were asked for, before the step computes anything. So a slot may be
freed and taken again at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.worker.engine.blocks import Copy
from quire.worker.engine.sequence import Sequence


class SlotError(AssertionError):
    """A contradiction in the bookkeeping of slots: a defect of the engine, never of a request."""


@dataclass(slots=True)
class StateCounters:
    """Counters since the start of the process, in slots."""

    snapshots: int = 0  # snapshots that the prefix cache got
    restored: int = 0  # sequences that began with a snapshot
    evictions: int = 0  # snapshots evicted for other uses of their slots
    copies: int = 0


@dataclass
class StateSlots:
    """Owns `num_slots` slots; the first `num_rows` belong to running sequences.

    interval: tokens between two snapshots of a prompt, a multiple of the block size. One more is taken at the end of
    its last full block.
    """

    num_rows: int
    num_slots: int
    interval: int
    counters: StateCounters = field(default_factory=StateCounters)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_slots - 1, self.num_rows - 1, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pinned: set[bytes] = set()
        self._copies: list[Copy] = []

    @property
    def num_free(self) -> int:
        """Slots above the rows that hold nothing."""
        return len(self._free)

    @property
    def num_snapshots(self) -> int:
        """Snapshots that the prefix cache can use."""
        return len(self._snapshots)

    def figures(self) -> dict[str, int]:
        """Return the figures of `quire.worker.inspect.snapshot.EngineUsage` about states."""
        return {
            "state_snapshots": self.num_snapshots,
            "state_slots_free": self.num_free,
            "state_slots_held": self.num_slots - self.num_rows - self.num_snapshots - self.num_free,
            "states_restored": self.counters.restored,
            "state_evictions": self.counters.evictions,
        }

    # --- copies -------------------------------------------------------------------------------------------------------

    def copy(self, source: int, target: int) -> None:
        """Copy a slot before the next step computes anything."""
        self._copies.append(Copy(source, target))
        self.counters.copies += 1

    def take_copies(self) -> list[Copy]:
        """Return the copies asked for since the last call, in their order."""
        copies, self._copies = self._copies, []
        return copies

    # --- slots --------------------------------------------------------------------------------------------------------

    def can_take(self, count: int) -> bool:
        """Return whether `take` would succeed this many times."""
        return count <= len(self._free) + len(self._snapshots) - len(self._pinned)

    def take(self) -> int | None:
        """Take a free slot, or that of the least recently used snapshot. Returns None if all slots are in use."""
        if self._free:
            return self._free.pop()
        for key in self._snapshots:
            if key not in self._pinned:
                self.counters.evictions += 1
                return self._snapshots.pop(key)
        return None

    def release(self, slot: int) -> None:
        """Return a slot that was taken."""
        self._free.append(slot)

    def free(self, sequence: Sequence) -> None:
        """Release what a sequence holds besides its row."""
        for slot in sequence.held_snapshots.values():
            self.release(slot)
        sequence.held_snapshots.clear()
        if sequence.parked_slot is not None:
            self.release(sequence.parked_slot)
            sequence.parked_slot = None

    def park(self, sequences: list[Sequence], rows: list[int]) -> None:
        """Copy the states of sequences that are swapped out from their former rows. `can_take` has been checked."""
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.parked_slot = self.take()
            if sequence.parked_slot is None:
                raise SlotError("no slot is left for a sequence that is swapped out")
            self.copy(row, sequence.parked_slot)

    def unpark(self, sequence: Sequence) -> None:
        """Copy the state of a sequence that is swapped in to its row."""
        if sequence.parked_slot is None:
            raise SlotError("a sequence that is swapped in has no state")
        self.copy(sequence.parked_slot, sequence.row)
        self.release(sequence.parked_slot)
        sequence.parked_slot = None

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """Return the slot of the snapshot at the end of the block with this hash, if there is one."""
        return self._snapshots.get(key)

    def restore(self, key: bytes, row: int) -> None:
        """Copy a snapshot to the slot of a sequence."""
        self.copy(self._snapshots[key], row)
        self._snapshots.move_to_end(key)
        self.counters.restored += 1

    def hold(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Take a slot for a snapshot of a sequence after `num_tokens` tokens. Returns None if all slots are in use."""
        slot = self.take()
        if slot is not None:
            sequence.held_snapshots[num_tokens] = slot
        return slot

    def hold_last(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Take a slot as `hold` does, but that of the sequence's last held snapshot if there is one."""
        if not sequence.held_snapshots:
            return self.hold(sequence, num_tokens)
        slot = sequence.held_snapshots.pop(max(sequence.held_snapshots))
        sequence.held_snapshots[num_tokens] = slot
        return slot

    def keep(self, sequence: Sequence, num_tokens: int, key: bytes | None) -> None:
        """Give a held snapshot to the prefix cache, or release it if there is one already.

        key: the hash of the block that ends after `num_tokens` tokens; None if the prefix cache does not know it.
        """
        slot = sequence.held_snapshots.pop(num_tokens)
        if key is None or key in self._snapshots:
            self.release(slot)
            return
        self._snapshots[key] = slot
        self.counters.snapshots += 1

    def forget(self, key: bytes) -> None:
        """Release the snapshot of a block that the prefix cache has forgotten."""
        if (slot := self._snapshots.pop(key, None)) is not None:
            self.release(slot)

    def pin(self, key: bytes) -> None:
        """Protect a snapshot from eviction. There must be one."""
        if key not in self._snapshots:
            raise SlotError("a block without a snapshot cannot be pinned")
        self._pinned.add(key)

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence], known: Iterable[bytes]) -> None:
        """Raise SlotError unless every slot is accounted for.

        sequences: all sequences of the engine. known: hashes of all blocks that the prefix cache knows.
        """
        used = [*self._free, *self._snapshots.values()]
        for sequence in sequences:
            used += sequence.held_snapshots.values()
            if sequence.parked_slot is not None:
                used.append(sequence.parked_slot)
        if sorted(used) != list(range(self.num_rows, self.num_slots)):
            raise SlotError("free and used slots do not add up to all slots")
        if not self._snapshots.keys() <= set(known):
            raise SlotError("a snapshot belongs to a block that the prefix cache does not know")
        if not self._pinned <= self._snapshots.keys():
            raise SlotError("a pinned snapshot is gone")
