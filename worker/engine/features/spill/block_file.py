"""A file of blocks, found by their keys: fixed places, each with an entry in a table at the beginning of the file.

    header     magic, fingerprint, bytes of a block, number of places, checksum; PAGE bytes
    entries    of each place: key, checksum of the block, number of the write, checksum of the entry
    blocks     each at a multiple of PAGE

The fingerprint says what computed the blocks; a file of another fingerprint is emptied. Keys cover the fingerprint as
well, and the checksum of a block covers its key. So a block that is damaged, incomplete, or of another model is never
taken for what is looked up: `read` returns False, and the place is free again.

The entry of a place is cleared before its block is written and set after it, so a killed process leaves no entry
without its block. One process at a time has the file, by a lock that ends with the process. The file has its whole
size from the start: it is never larger than `max_bytes`, and writing it finds no full disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from quire.shared.process.errors import StartError

log = logging.getLogger(__name__)

PAGE = 4096
MAGIC = b"quire kv blocks1"
HEADER = struct.Struct("<16s32sQQ16s")
ENTRY = struct.Struct("<32s16sQ8s")
KEY_BYTES, SUM_BYTES, ENTRY_SUM_BYTES = 32, 16, 8
# Files of one folder that are tried, one for each worker that uses it at the same time.
MAX_FILES = 64

Buffers = Sequence[memoryview]


class DamagedBlock(Exception):
    """A block of the file is not what was written."""


def block_key(fingerprint: bytes, block_hash: bytes) -> bytes:
    """Return the key of a block. block_hash: of the prefix cache; covers tokens, salt, scope and adapter."""
    return hashlib.blake2b(block_hash, key=fingerprint, digest_size=KEY_BYTES).digest()


class BlockFile:
    """An open, locked file. Not safe for use by several threads, except `in` and `len`.

    num_foreign, num_damaged: blocks that were dropped at the start, because something else computed them or because
    their entries are damaged. A damaged header counts as one block.
    """

    def __init__(self, file: int, path: Path, fingerprint: bytes, block_bytes: int, num_places: int) -> None:
        self.path = path
        self.num_foreign = self.num_damaged = 0
        self._file, self._fingerprint, self._block_bytes, self.num_places = file, fingerprint, block_bytes, num_places
        self._places: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._num_writes = 0
        if self._begin():
            self._read_entries()
        used = set(self._places.values())
        self._free = [place for place in range(num_places - 1, -1, -1) if place not in used]

    @classmethod
    def open(cls, folder: Path, fingerprint: bytes, block_bytes: int, max_bytes: int) -> BlockFile:
        """Open a file of the folder that no other process uses, preferably one with this fingerprint; or make one.

        Raises StartError.
        """
        num_places = (max_bytes - 2 * PAGE) // (_pages(block_bytes) + ENTRY.size)
        if num_places < 1:
            raise StartError(
                f"--kv-spill-gb {max_bytes / 2**30:.3g} is too small for one block of {block_bytes / 2**20:.2f} MiB: "
                "raise it"
            )
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # `_choose` locks files that it does not take. Another worker would take them for files in use.
                fcntl.flock(lock, fcntl.LOCK_EX)
                file, path = _choose(folder, fingerprint)
            finally:
                os.close(lock)
            return cls(file, path, fingerprint, block_bytes, num_places)
        except OSError as error:
            remedy = {
                errno.ENOSPC: "lower --kv-spill-gb, or make room",
                errno.EDQUOT: "lower --kv-spill-gb, or raise the quota",
                errno.ENOENT: "make the folder above it first",
            }.get(error.errno or 0, "give a folder on a local disk that this user may write to")
            raise StartError(f"--kv-spill-dir {folder}: {error.strerror}; {remedy}") from error

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def touch(self, key: bytes) -> None:
        """Count a block as used, so that others are overwritten before it."""
        with suppress(KeyError):
            self._places.move_to_end(key)

    def write(self, key: bytes, block: Buffers) -> None:
        """Write a block, in the place of the one that was used least recently if no place is free. Raises OSError."""
        if key in self._places:
            return
        place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
        self._num_writes += 1
        body = key + _sum(key, block) + self._num_writes.to_bytes(8, "little")
        try:
            self._put(bytes(ENTRY.size), self._entry_at(place))
            if os.pwritev(self._file, block, self._block_at(place)) != self._block_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._put(body + self._entry_sum(body), self._entry_at(place))
        except OSError:
            self._free.append(place)
            raise
        self._places[key] = place

    def read(self, key: bytes, into: Buffers) -> bool:
        """Read a block. Returns False if the file does not have it. Raises OSError, and DamagedBlock, which frees the
        place."""
        place = self._places.get(key)
        if place is None:
            return False
        entry = os.pread(self._file, ENTRY.size, self._entry_at(place))
        count = os.preadv(self._file, into, self._block_at(place))
        own, checksum, _ = _parse_entry(entry, self._entry_sum)
        if count == self._block_bytes and own == key and checksum == _sum(key, into):
            self.touch(key)
            return True
        self.remove(key)
        raise DamagedBlock(f"{self.path}: the block at place {place} is not what was written there")

    def remove(self, key: bytes) -> None:
        """Free the place of a block. Raises OSError."""
        place = self._places.pop(key)
        self._free.append(place)
        self._put(bytes(ENTRY.size), self._entry_at(place))

    def forget_pages(self) -> None:
        """Write all blocks to the disk, and drop them from the system's memory: the next reads come from the disk."""
        os.fdatasync(self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._file)

    # --- layout -------------------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return self._block_at(self.num_places)

    def _entry_at(self, place: int) -> int:
        return PAGE + place * ENTRY.size

    def _block_at(self, place: int) -> int:
        return PAGE + _pages(self.num_places * ENTRY.size) + place * _pages(self._block_bytes)

    def _entry_sum(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=self._fingerprint, digest_size=ENTRY_SUM_BYTES).digest()

    def _put(self, data: bytes, at: int) -> None:
        if os.pwrite(self._file, data, at) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _begin(self) -> bool:
        """Give the file its size and header. Returns whether it has had the same header before."""
        fields = self._fingerprint, self._block_bytes, self.num_places
        found = _parse(os.pread(self._file, HEADER.size, 0))
        if found == fields:
            os.posix_fallocate(self._file, 0, self._size)
            os.ftruncate(self._file, self._size)
            return True
        if os.fstat(self._file).st_size:
            entries = os.pread(self._file, ENTRY.size * found[2], PAGE) if found[2] else b""
            self.num_foreign = sum(any(entries[at : at + KEY_BYTES]) for at in range(0, len(entries), ENTRY.size))
            self.num_damaged = int(not found[2])
            why = f"{self.num_foreign} blocks are of another model, size or configuration"
            log.warning("%s begins anew: %s", self.path, why if found[2] else "its header is damaged")
        os.ftruncate(self._file, 0)
        os.posix_fallocate(self._file, 0, self._size)
        body = HEADER.pack(MAGIC, *fields, bytes(SUM_BYTES))[:-SUM_BYTES]
        self._put(body + _header_sum(body), 0)
        return False

    def _read_entries(self) -> None:
        """Find the blocks that another process has written, in the order of its writes."""
        table = os.pread(self._file, self.num_places * ENTRY.size, PAGE)
        found = []
        for place in range(self.num_places):
            entry = table[place * ENTRY.size : (place + 1) * ENTRY.size]
            if not any(entry):
                continue
            key, _, number = _parse_entry(entry, self._entry_sum)
            if key:
                found.append((number, key, place))
            else:
                self.num_damaged += 1
        for number, key, place in sorted(found):
            self._places[key] = place
            self._num_writes = number


def _choose(folder: Path, fingerprint: bytes) -> tuple[int, Path]:
    """Open and lock a file of the folder: one with this fingerprint, else one of another, else a new one."""
    others: list[tuple[int, Path]] = []
    chosen = None
    for path in sorted(folder.glob("blocks-*.kv")):
        if (file := _open_locked(path)) is not None:
            others.append((file, path))
            if _parse(os.pread(file, HEADER.size, 0))[0] == fingerprint:
                chosen = others.pop()
                break
    chosen = chosen or (others.pop(0) if others else None)
    for file, _ in others:
        os.close(file)
    for number in range(MAX_FILES):
        path = folder / f"blocks-{number}.kv"
        if chosen is None and (file := _open_locked(path)) is not None:
            chosen = file, path
    if chosen is None:
        raise StartError(f"--kv-spill-dir {folder}: {MAX_FILES} workers use it; give this one another folder")
    return chosen


def _open_locked(path: Path) -> int | None:
    """Open a file and lock it. Returns None if another process has it. Raises StartError for one of another user."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    status = os.fstat(file)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise StartError(f"{path}: another user's file, or no regular file; remove it, or give another --kv-spill-dir")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _pages(count: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-count // PAGE) * PAGE


def _sum(key: bytes, block: Buffers) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=SUM_BYTES)
    for part in block:
        digest.update(part)
    return digest.digest()


def _header_sum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=SUM_BYTES).digest()


def _parse(header: bytes) -> tuple[bytes, int, int]:
    """Return fingerprint, bytes of a block and number of places; nothing of each for a header that is damaged."""
    body, checksum = header[:-SUM_BYTES], header[-SUM_BYTES:]
    if len(header) < HEADER.size or checksum != _header_sum(body):
        return b"", 0, 0
    magic, fingerprint, block_bytes, num_places, _ = HEADER.unpack(header)
    return (fingerprint, block_bytes, num_places) if magic == MAGIC else (b"", 0, 0)


def _parse_entry(entry: bytes, entry_sum: Callable[[bytes], bytes]) -> tuple[bytes, bytes, int]:
    """Return key, checksum of the block and number of the write; nothing of each for an entry that is damaged."""
    if len(entry) < ENTRY.size or entry[-ENTRY_SUM_BYTES:] != entry_sum(entry[:-ENTRY_SUM_BYTES]):
        return b"", b"", 0
    key, checksum, number, _ = ENTRY.unpack(entry)
    return key, checksum, number
