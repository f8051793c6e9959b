"""Occupancy: the number of blocks of a kernel on one multiprocessor, by compute capability (CUDA programming guide)."""

from __future__ import annotations

from typing import NamedTuple


class Multiprocessor(NamedTuple):
    """The limits of one multiprocessor."""

    warps: int
    blocks: int
    shared: int  # bytes
    shared_per_block: int  # bytes, the most that a kernel may ask for


REGISTERS = 65536  # of each multiprocessor below
REGISTER_UNIT = 256  # registers of a warp are allocated in this unit
SHARED_UNIT, SHARED_RESERVED = 128, 1024  # bytes; CUDA itself takes the second for each block
MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 164 << 10, 163 << 10),
    89: Multiprocessor(48, 24, 100 << 10, 99 << 10),
    90: Multiprocessor(64, 32, 228 << 10, 227 << 10),
    100: Multiprocessor(64, 32, 228 << 10, 227 << 10),
    120: Multiprocessor(48, 24, 100 << 10, 99 << 10),
}


def blocks_per_multiprocessor(capability: int, warps: int, registers: int, shared: int) -> int:
    """Return the number of blocks that fit: `warps` each, `registers` for a thread, `shared` bytes for a block.

    0 if the kernel cannot be launched.
    """
    limit = MULTIPROCESSORS[capability]
    if shared > limit.shared_per_block:
        return 0
    of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    of_block = -(-shared // SHARED_UNIT) * SHARED_UNIT + SHARED_RESERVED
    return min(limit.blocks, limit.warps // warps, REGISTERS // of_warp // warps, limit.shared // of_block)
