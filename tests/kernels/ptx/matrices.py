"""The places of matrix elements in PTX: in the registers of threads, and in shared memory."""

from functools import cache

import numpy as np

from tests.kernels.ptx.fault import PtxFault

LANES = np.arange(32)
WARPGROUP = 128  # threads that issue a product of Hopper together


@cache
def row_of(groups: int = 1) -> np.ndarray:
    """Return the row of a thread's first element in a fragment of 16 rows per warp, [32 * groups]."""
    thread = np.arange(32 * groups)
    return 16 * (thread // 32) + thread % 32 // 4


@cache
def column_of(groups: int = 1) -> np.ndarray:
    """Return the column of a thread's first element, [32 * groups]."""
    return 2 * (np.arange(32 * groups) % 4)


@cache
def accumulator_places(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns [registers, 128] of the accumulators of a product of 64 rows."""
    register = np.arange(columns // 2)
    block, lower, odd = register // 4, register % 4 // 2, register % 2
    rows = row_of(4)[None, :] + 8 * lower[:, None]
    return rows, column_of(4)[None, :] + 8 * block[:, None] + odd[:, None]


@cache
def operand_addresses(descriptor: int, rows: int, transposed: bool) -> np.ndarray:
    """Return the addresses [rows, 16] of the elements that a matrix descriptor names.

    Elements have 2 bytes (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout"). transposed: the rows,
    not the 16 summed elements, are contiguous.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    mode = descriptor >> 62
    if mode == 0:
        raise PtxFault("the emulator does not know operands without a swizzle")
    width, bits = {1: (128, 3), 2: (64, 2), 3: (32, 1)}[mode]
    row, depth = np.arange(rows)[:, None], np.arange(16)[None, :]
    if transposed:
        period = width // 2
        at = start + row % period * 2 + row // period * leading + depth % 8 * width + depth // 8 * stride
    else:
        at = start + row // 8 * stride + row % 8 * width + depth * 2
    return at ^ ((at >> 7 & (1 << bits) - 1) << 4)
