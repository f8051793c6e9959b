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
    """Return the column of a thread's first element of results, and of operands of 2 bytes, [32 * groups]."""
    return 2 * (np.arange(32 * groups) % 4)


@cache
def left_places(size: int, groups: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return rows and columns [32 * groups] of a left operand in four registers, for each element of each register.

    size: bytes of an element. The operand has 16 rows per warp, and 32 / size columns.
    """
    count = 4 // size  # elements of a register
    first = count * (np.arange(32 * groups) % 4)
    return [
        (row_of(groups) + 8 * (register % 2), first + odd + 4 * count * (register // 2))
        for register in range(4)
        for odd in range(count)
    ]


@cache
def right_places(size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return rows and columns [32] of a right operand in two registers, for each element of each register.

    size: bytes of an element. The operand has 32 / size rows and 8 columns.
    """
    count = 4 // size
    return [
        (count * (LANES % 4) + odd + 4 * count * register, LANES // 4) for register in range(2) for odd in range(count)
    ]


@cache
def accumulator_places(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns [registers, 128] of the accumulators of a product of 64 rows."""
    register = np.arange(columns // 2)
    block, lower, odd = register // 4, register % 4 // 2, register % 2
    rows = row_of(4)[None, :] + 8 * lower[:, None]
    return rows, column_of(4)[None, :] + 8 * block[:, None] + odd[:, None]


@cache
def operand_addresses(descriptor: int, rows: int, transposed: bool, size: int = 2) -> np.ndarray:
    """Return the addresses [rows, 32 / size] of the elements that a matrix descriptor names.

    See PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout". size: bytes of an element. transposed: the
    rows, not the summed elements, are contiguous. Only elements of 2 bytes can be transposed.
    """
    assert size == 2 or not transposed
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    mode = descriptor >> 62
    if mode == 0:
        raise PtxFault("the emulator does not know operands without a swizzle")
    width, bits = {1: (128, 3), 2: (64, 2), 3: (32, 1)}[mode]
    row, depth = np.arange(rows)[:, None], np.arange(32 // size)[None, :]
    if transposed:
        period = width // 2
        at = start + row % period * 2 + row // period * leading + depth % 8 * width + depth // 8 * stride
    else:
        at = start + row // 8 * stride + row % 8 * width + depth * size
    return at ^ ((at >> 7 & (1 << bits) - 1) << 4)
