"""The spill: evicted blocks go to a pool in host memory, from there to a file, and come back into the prefix cache.

    evicted --swap_out--> pool --thread--> file      save_evicted: copies only; if no place is free the block is lost
    released --^                                     save_idle: blocks that may be evicted next, before they are
    cached <--swap_in---- pool <--thread-- file      delays: a waiting sequence whose prefix continues here

The engine's thread copies between cache and pool, in the order of the device's operations. The spill's own thread does
everything with the file, reads before writes. A place of the pool is free, `clean` (its block may be overwritten),
`dirty` (its block is not in the file yet), or in the hands of a read.

One sequence at a time is read for: the next one to start. Its blocks become cached blocks without owner, as if they had
never been evicted, and the sequence then starts on them like on any cached prefix. It does not wait longer than it
would take to compute these tokens again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from quire.worker.engine.blocks import CachedPrefix
from quire.worker.engine.features.spill.block_file import BlockFile, DamagedBlock, block_key
from quire.worker.engine.features.spill.blocks import SpillingBlockManager
from quire.worker.engine.features.spill.host_pool import HostPool
from quire.worker.engine.groups import Groups
from quire.worker.engine.sequence import Sequence
from quire.worker.engine.spill import DISK, HOST, REASONS, TIERS, SpillFigures
from quire.worker.engine.transfers import StreamMark

log = logging.getLogger(__name__)

# Longest time that the engine's thread sleeps while a sequence is read for and nothing else runs.
NAP_S = 0.01
# Longest time that the end of the worker waits for blocks to be written.
CLOSE_S = 5.0
# Blocks that a step may copy before they are evicted, and the share of the pool that such blocks may take.
STEP_BLOCKS = 8
AHEAD_SHARE = 4
# Weight of the newest block in the average time of a read.
NEWEST = 0.05
# Nothing is read while the thread waits for the file for longer than this.
STUCK_S = 1.0
# Factor of the time of a read after a prefix was not read because of it, so that reads are tried again some day.
FADE = 0.98


@dataclass(frozen=True, slots=True)
class SpillCosts:
    """Seconds to read a block from the file, and to compute its tokens again."""

    read_s: float
    compute_s: float


@dataclass(slots=True, eq=False)
class _Read:
    """The blocks of a sequence that come back. `left` and `arrived` are guarded by the lock of the spill."""

    leader: Sequence
    deadline: float = 0.0
    left: deque[tuple[bytes, bytes]] = field(default_factory=deque)  # hashes and keys, in order
    arrived: list[tuple[bytes, bytes, int]] = field(default_factory=list)  # hash, key and place in the pool
    is_busy: bool = False  # the thread reads a block for it
    is_given_up: bool = False  # its sequence does not wait any more

    @property
    def is_over(self) -> bool:
        return self.is_given_up or not (self.left or self.arrived or self.is_busy)


class BlockSpill:
    """The spill of one engine (`quire.worker.engine.spill`). All methods are called on the engine's thread.

    fingerprint: of what determines the bytes of a block besides the tokens. file: None for a pool alone.
    """

    def __init__(
        self,
        groups: Groups,
        pool: HostPool,
        device: torch.device,
        fingerprint: bytes,
        file: BlockFile | None,
        costs: SpillCosts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert isinstance(groups.blocks, SpillingBlockManager)
        self._groups, self._blocks, self._pool, self._device = groups, groups.blocks, pool, device
        self._blocks.evicted.clear()  # steps have overwritten blocks that were evicted so far
        self._fingerprint, self._file, self._clock = fingerprint, file, clock
        self._read_s, self._compute_s = costs.read_s, costs.compute_s
        self._kept: Counter[str] = Counter()
        self._num_read: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._num_slower = 0
        self._was_asked = False  # the sequence that is read for has asked since the last step
        if file is not None:
            self._dropped.update(foreign=file.num_foreign, corrupt=file.num_damaged)
        # Guards everything below, and the counters. The thread holds it only between two blocks.
        self._lock = threading.Condition()
        self._free = list(range(pool.num_places))
        self._clean: OrderedDict[bytes, int] = OrderedDict()  # used last at the end
        self._dirty: dict[bytes, int] = {}
        self._ahead: set[bytes] = set()  # those of `dirty` that the cache still has
        self._writes: deque[tuple[bytes, StreamMark]] = deque()
        self._read: _Read | None = None
        # After all copies from the pool: the thread may write to its places then.
        self._copied_in = StreamMark(device)
        self._busy_since = 0.0  # since when the thread waits for the file; 0: it does not
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-spill", daemon=True)
        self._thread.start()

    # --- out of the cache ---------------------------------------------------------------------------------------------

    def save_evicted(self) -> None:
        self._end_unasked()
        self._save_evicted()
        self._save_released(STEP_BLOCKS)

    def save_idle(self) -> None:
        self._end_unasked()
        self._save_released(self._pool.num_places)

    def _save_evicted(self) -> None:
        evicted, self._blocks.evicted = self._blocks.evicted, []
        if evicted:
            self._save(evicted)

    def _save_released(self, count: int) -> None:
        """Write blocks that will be evicted some day, so that many can be evicted at once. They take few places."""
        if self._blocks.released and self._file is not None:
            count = min(count, self._pool.num_places // AHEAD_SHARE - len(self._dirty))
            if count > 0 and (released := self._blocks.take_released(count)):
                self._save(released, is_ahead=True)

    def _save(self, evicted: list[tuple[int, bytes]], is_ahead: bool = False) -> None:
        """Copy blocks to the pool, and have them written. evicted: blocks and their hashes.

        is_ahead: the cache has them still, so the pool does not keep them once they are written.
        """
        blocks: list[int] = []
        taken: dict[bytes, int] = {}
        with self._lock:
            for block, block_hash in evicted:
                key = block_key(self._fingerprint, block_hash)
                if key in taken or self._has(key):
                    self._touch(key)
                elif (place := self._take_place()) is None:
                    self._dropped["queue_full"] += 1
                else:
                    taken[key] = place
                    blocks.append(block)
        if not blocks:
            return
        copied = StreamMark(self._device)
        try:
            self._pool.swap_out(blocks, [*taken.values()])
            copied.set()
        except BaseException:
            with self._lock:
                self._free.extend(taken.values())
            raise
        with self._lock:
            self._kept[HOST] += len(taken)
            if self._file is None:
                for key, place in taken.items():
                    self._keep(key, place)
            else:
                self._dirty.update(taken)
                self._ahead.update(taken if is_ahead else ())
                self._writes.extend((key, copied) for key in taken)
            self._lock.notify_all()

    def _has(self, key: bytes) -> bool:
        return key in self._clean or key in self._dirty or (self._file is not None and key in self._file)

    def _touch(self, key: bytes) -> None:
        if key in self._clean:
            self._clean.move_to_end(key)
        if self._file is not None:
            self._file.touch(key)

    def _take_place(self) -> int | None:
        """Take a place of the pool: a free one, or that of the clean block that was used least recently."""
        if self._free:
            return self._free.pop()
        return self._clean.popitem(last=False)[1] if self._clean else None

    def _keep(self, key: bytes, place: int) -> None:
        """Let a place be clean, or free if the pool has the same block in another one."""
        if key in self._clean or key in self._dirty:
            self._free.append(place)
        else:
            self._clean[key] = place

    # --- back into the cache ------------------------------------------------------------------------------------------

    def delays(self, leader: Sequence, prefix: CachedPrefix, num_tokens: int) -> bool:
        read = self._read
        if read is None or read.leader is not leader:
            self._give_up()
            read = self._begin(leader, prefix, num_tokens)
        self._was_asked = True
        self._refill(read)
        with self._lock:
            is_late = self._clock() > read.deadline
            if not (read.is_over or is_late):
                if not self._groups.running:
                    self._lock.wait_for(lambda: self._needs_engine(read), NAP_S)
                return True
            self._num_slower += not read.is_over
        self._give_up()
        return False

    def _needs_engine(self, read: _Read) -> bool:
        """Return whether the thread has read all blocks, or has no place for more."""
        return not (read.left or read.is_busy) or bool(read.arrived and not (self._free or self._clean))

    def _begin(self, leader: Sequence, prefix: CachedPrefix, num_tokens: int) -> _Read:
        """Look for the blocks that continue a cached prefix, and have them read if this is faster."""
        read = self._read = _Read(leader)
        size = self._blocks.block_size
        # Evicting blocks of the prefix itself would gain nothing.
        room = self._blocks.num_free - sum(not self._blocks.ref_counts[block] for block in prefix.blocks)
        first = prefix.num_tokens // size
        num_read = 0
        with self._lock:
            if self._busy_since and self._clock() - self._busy_since > STUCK_S:
                return read
            for block_hash in self._blocks.hashes(leader, first, min(num_tokens // size, first + room)):
                key = block_key(self._fingerprint, block_hash)
                if not self._has(key):
                    break
                num_read += key not in self._clean and key not in self._dirty
                read.left.append((block_hash, key))
            computing_s = len(read.left) * self._compute_s
            if num_read * self._read_s > computing_s:
                read.left.clear()
                self._num_slower += 1
                self._read_s *= FADE
            read.deadline = self._clock() + computing_s
            for _, key in reversed(read.left):  # as in the prefix cache, the end of a text is lost before its beginning
                self._touch(key)
            if read.left:
                self._blocks.use(prefix.blocks)
                self._lock.notify_all()
        return read

    def _refill(self, read: _Read) -> None:
        """Copy blocks that have arrived in the pool into the cache."""
        with self._lock:
            arrived, read.arrived = read.arrived, []
        if not arrived:
            return
        places, blocks = [], []
        # No more than are free, so that none of these evicts another one.
        for block_hash, _, place in arrived[: self._blocks.num_free]:
            if (block := self._blocks.refill(block_hash)) is not None:
                places.append(place)
                blocks.append(block)
        try:
            self._save_evicted()  # evicted blocks only: released ones may be in `blocks`, whose contents come now
            if blocks:
                self._pool.swap_in(places, blocks)
        except BaseException:
            self._blocks.drop_cached(blocks)
            raise
        self._copied_in.set()
        with self._lock:
            for _, key, place in arrived:
                self._keep(key, place)
            self._lock.notify_all()

    def _give_up(self) -> None:
        """Read nothing more for the current sequence. Blocks that have arrived stay in the pool."""
        with self._lock:
            if self._read is not None:
                self._read.is_given_up = True
                self._read.left.clear()
                for _, key, place in self._read.arrived:
                    self._keep(key, place)
                self._read.arrived.clear()

    def _end_unasked(self) -> None:
        """Give up a read whose sequence has not asked since the last call: it has ended, or there is no room for it."""
        if self._read is not None and not self._was_asked:
            self._give_up()
            self._read = None
        self._was_asked = False

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._can_read() or self._writes or self._is_closed):
                    self._lock.wait()
                if self._is_closed and not self._writes:
                    return
                read = self._read if self._can_read() else None
                self._busy_since = self._clock()
                if read is not None:
                    block_hash, key = read.left.popleft()
                    read.is_busy = True
            if read is None:
                self._write_next()
                continue
            place = self._bring(key)
            with self._lock:
                read.is_busy, self._busy_since = False, 0.0
                if place is None:
                    read.left.clear()  # a later block is of no use without this one
                elif read is self._read and not read.is_given_up:
                    read.arrived.append((block_hash, key, place))
                else:
                    self._keep(key, place)
                self._lock.notify_all()

    def _can_read(self) -> bool:
        """Return whether a block can be read now. A block that is still to be written is written first."""
        read = self._read
        if read is None or not read.left:
            return False
        key = read.left[0][1]
        return key not in self._dirty and bool(key in self._clean or self._free or self._clean)

    def _bring(self, key: bytes) -> int | None:
        """Return the place of the pool that has a block, after reading it if need be; None if it is lost."""
        with self._lock:
            place = self._clean.pop(key, None)
            if place is not None:
                self._num_read[HOST] += 1
                return place
            file = self._file
            place = self._take_place() if file is not None else None
        if place is None or file is None:
            return None
        is_read, reason = False, ""
        began = self._clock()
        try:
            self._copied_in.wait()
            is_read = file.read(key, self._pool.block(place))
        except DamagedBlock as error:
            reason = "corrupt"
            log.warning("%s; it is computed again", error)
        except OSError as error:
            reason = "error"
            self._end_file(error)
        with self._lock:
            if is_read:
                self._num_read[DISK] += 1
                self._read_s += NEWEST * (self._clock() - began - self._read_s)
                return place
            self._free.append(place)
            if reason:
                self._dropped[reason] += 1
            return None

    def _write_next(self) -> None:
        """Write one block, whose place is clean afterwards."""
        with self._lock:
            key, copied = self._writes.popleft()
            place, file = self._dirty[key], self._file
        is_written = False
        if file is not None:
            try:
                copied.wait()
                file.write(key, self._pool.block(place))
                is_written = True
            except OSError as error:
                self._end_file(error)
        with self._lock:
            self._busy_since = 0.0
            place = self._dirty.pop(key)
            if key in self._ahead:
                self._ahead.remove(key)
                self._free.append(place)
            else:
                self._keep(key, place)
            self._kept[DISK] += is_written
            self._dropped["error"] += not is_written
            self._lock.notify_all()

    def _end_file(self, error: OSError) -> None:
        """Go on without the file."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            log.warning(
                "%s: %s; blocks are not written to it and not read from it any more, until the worker is restarted",
                file.path,
                error.strerror,
            )

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def has_file(self) -> bool:
        return self._file is not None

    def figures(self) -> SpillFigures:
        with self._lock:
            in_pool, file = len(self._clean) + len(self._dirty), self._file
            blocks = {HOST: in_pool, DISK: len(file) if file is not None else 0}
            return SpillFigures(
                kept={tier: self._kept[tier] for tier in TIERS},
                read={tier: self._num_read[tier] for tier in TIERS},
                dropped={reason: self._dropped[reason] for reason in REASONS},
                slower=self._num_slower,
                blocks=blocks,
                num_bytes={tier: count * self._pool.block_bytes for tier, count in blocks.items()},
            )

    def close(self) -> None:
        """Write the blocks of the prefix cache for the next process, those used last first, for at most CLOSE_S."""
        file, until = self._file, self._clock() + CLOSE_S
        self._give_up()
        cached = self._blocks.findable()[: file.num_places] if file is not None else []
        try:
            self.save_evicted()
            while cached and self._file is not None and self._clock() < until:
                with self._lock:
                    count = len(self._free) + len(self._clean)
                    if not count:
                        self._lock.wait(NAP_S)
                self._save(cached[:count])
                del cached[:count]
        except Exception as error:  # from a device that is lost
            log.warning("the blocks of the prefix cache are not kept for the next worker: %s", error)
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._thread.join(max(0.0, until - self._clock()))
        if file is not None and not self._thread.is_alive():
            file.close()
