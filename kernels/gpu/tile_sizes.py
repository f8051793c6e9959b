"""Tile sizes of the attention and matmul kernels, from a table by shape. Nothing is tuned while serving.

The sizes are for an H200: 132 multiprocessors with 228 KB of shared memory each. Decoding streams the cache and depends
on the number of bytes in flight: `stages - 1` tiles of keys and of values for each of `per_sm` programs. Prefill is
bound by the tensor cores and depends on the number of rows that share a tile of keys. float32 takes three products for
one (tf32x3) and more registers, so its tiles are small.

Devices with less than LARGE_SHARED_BYTES of shared memory (compute capabilities 8.0, 8.6, 8.9 and 12.0) have tiles of
their own, which need at most 99 KB; devices with less than that are not supported. The matrix instructions of these
devices take both matrices from registers, so tiles have fewer keys: as many as no or few registers are spilled for
(tests/kernels/static/compiled_kernels.tsv). No such device has measured them.
"""

from dataclasses import dataclass

import torch

from quire.kernels.gpu.supported import WIDE_HEAD_DIM
from quire.kernels.grouped_weight import GROUP


@dataclass(frozen=True)
class AttentionTiles:
    """Tile sizes and launch options of an attention kernel."""

    rows: int  # of the query tile: heads of a group, times tokens for prefill
    keys: int
    warps: int
    stages: int
    per_sm: int = 1  # programs that one multiprocessor holds at a time; for persistent grids

    @property
    def paged_stages(self) -> int:
        """The stages of a loop that fetches block ids as long before the keys as the keys before their use."""
        return 2 * self.stages - 1


MIN_ROWS = 16  # the smallest number of rows of a matrix instruction
LARGE_SHARED_BYTES = 227 << 10  # shared memory of one program on compute capability 9.0 and 10.0


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def dot_precision(dtype: torch.dtype) -> str:
    """Return the `input_precision` of `tl.dot`: 16-bit types ignore it, plain float32 would not use tensor cores."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def decode_tiles(head_dim: int, group: int, dtype: torch.dtype, large_shared: bool = True) -> AttentionTiles:
    """Return the tiles of decoding.

    group: query heads per key-value head. A group of more than 64 (of more than 16, if a row has more than 512 bytes)
    is split over several tiles. large_shared: the device has LARGE_SHARED_BYTES. Two programs fit a multiprocessor of
    100 KB only if each fetches one tile ahead: 64 KB in flight, several times what a device without it needs.
    """
    if head_dim > WIDE_HEAD_DIM:  # 8 warps: with 4, a thread has 64 sums and spills registers
        return AttentionTiles(MIN_ROWS, 16, 8, 3)
    width = power_of_2(head_dim) * dtype.itemsize  # bytes of one key in a tile
    rows = min(64 if width <= 512 else MIN_ROWS, max(MIN_ROWS, power_of_2(group)))
    stages = 3 if rows == MIN_ROWS and dtype.itemsize == 2 and large_shared else 2
    keys = max(16, min(128 if dtype.itemsize == 2 else 32, 128 * 128 // width))
    return AttentionTiles(rows, keys, 4, stages, 2)


def prefill_tiles(
    head_dim: int, group: int, dtype: torch.dtype, window: int = 0, large_shared: bool = True
) -> AttentionTiles:
    """Return the tiles of prefill.

    window: of the layer, 0: none. A window takes one more loop and more registers. large_shared: the device has
    LARGE_SHARED_BYTES.
    """
    width = power_of_2(head_dim) * dtype.itemsize
    if head_dim > WIDE_HEAD_DIM:
        # This fits into 99 KB, and uses no warpgroup products, whose left matrix would be in registers: see below. A
        # tile of 64 rows would use them, with half of the traffic from the L2 cache. With 32 keys it spills 136 bytes.
        return AttentionTiles(32, 32, 8, 2)
    if not large_shared and width > 256 and group <= 64:
        if dtype.itemsize == 2:
            return AttentionTiles(64, 32, 8, 2)
        rows = max(32 if width <= 512 else MIN_ROWS, power_of_2(group))
        return AttentionTiles(rows, 32 if rows <= 32 and width <= 512 else 16, 4, 2)
    if not large_shared and dtype.itemsize == 2 and width <= 256:
        return AttentionTiles(128, 64 if width <= 128 else 32, 8, 3)
    if dtype.itemsize == 4:
        tiles = (
            AttentionTiles(64, 32, 4, 2)
            if width <= 256
            else AttentionTiles(64, 32, 8, 2)
            if width <= 512
            # Tiles of 64 rows use Hopper's warpgroup products. ptxas 12.8 takes the descriptors of V from registers
            # that hold other values: an illegal memory access on an H200. ptxas 13.1 and 13.5 compile them correctly.
            else AttentionTiles(32, 16, 8, 2)
        )
    elif width <= 128:
        tiles = AttentionTiles(128, 128, 8, 3)
    elif width <= 256:
        # Scores, weights and results of 128 keys just fit into the registers of 256 threads. Per key, 128 keys take
        # 30 % fewer instructions than 64, and half of the barriers. With the third stage prefill was 1.07 times as fast
        # on an H200.
        tiles = AttentionTiles(128, 64, 8, 3) if window else AttentionTiles(128, 128, 8, 3)
    else:
        # With 64 rows, two groups of four warps would compute the same scores.
        tiles = AttentionTiles(128, 64, 8, 2)
    if group <= tiles.rows:
        return tiles
    return AttentionTiles(power_of_2(group), tiles.keys, tiles.warps, tiles.stages)


# The batch-invariant mode sums pieces of this many keys separately, so that many programs can share one long row.
INVARIANT_PIECE = 2048


def invariant_tiles(
    head_dim: int, group: int, dtype: torch.dtype, window: int, large_shared: bool = True
) -> tuple[AttentionTiles, AttentionTiles]:
    """Return the tiles of rows and of prompts in the batch-invariant mode. Arguments as for `prefill_tiles`.

    Both use the same instructions, and distribute them over a warp in the same way: a tile of rows has the smallest
    number of rows of Hopper's matrix instructions, and a tile of prompts has that number for each four warps.
    """
    tiles = prefill_tiles(head_dim, group, dtype, window, large_shared)
    if dtype.itemsize == 4:
        return tiles, tiles
    if head_dim > WIDE_HEAD_DIM:  # tiles of 32 rows spill up to 576 bytes
        tiles = AttentionTiles(MIN_ROWS, 32, 8, 2)
        return tiles, tiles
    if head_dim > 128:  # sums of pieces take registers
        tiles = AttentionTiles(64, 32, 8, 3 if large_shared else 2)
        return tiles, tiles
    if head_dim > 64:
        tiles = AttentionTiles(128, 64, 8, 3) if large_shared else AttentionTiles(128, 32, 8, 2)
    return AttentionTiles(64, tiles.keys, 4, tiles.stages, 2), tiles


@dataclass(frozen=True)
class MatmulTiles:
    """Tile sizes and launch options of `invariant_matmul`."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


PLACES = 100  # tiles that keep a device busy; with fewer, smaller tiles are faster


def matmul_tiles(tokens: int, columns: int, dtype: torch.dtype) -> MatmulTiles:
    """Return the tiles of a matmul. tokens: rows of x; columns: rows of the weights.

    A multiprocessor fetches rows + columns values for rows * columns products, so large tiles are faster if there are
    enough of them. A decode step streams the weights; its tiles depend on the number of bytes in flight on the device.
    """
    if dtype.itemsize == 4:
        return MatmulTiles(32, 32, 32, 4, 3)
    if tokens > 64 and -(-tokens // 128) * -(-columns // 128) >= PLACES:
        return MatmulTiles(128, 128, 64, 8, 4)
    if tokens > 128:
        return MatmulTiles(128, 64, 64, 8, 4)
    return MatmulTiles(64, 64, 64, 4, 6) if columns > 2048 else MatmulTiles(64, 32, 64, 4, 8)


def grouped_tiles(rows: int, experts: int, dtype: torch.dtype, invariant: bool = False) -> MatmulTiles:
    """Return the tiles of the grouped product over experts. rows: of all experts together.

    With few rows per expert, the product streams the weights, and a tile has the fewest rows of a matrix instruction.
    The first product has two tiles of weights at a time. invariant: a row has the same bits among any number of rows,
    so that all tiles need the same instructions, which those of 16 rows do not have.
    """
    if dtype.itemsize == 4:
        return MatmulTiles(MIN_ROWS, 32, 32, 4, 2)
    if rows <= 32 * experts and not invariant:
        return MatmulTiles(MIN_ROWS, 64, 64, 4, 4)
    return MatmulTiles(64, 64, 64, 4, 3) if rows <= 128 * experts else MatmulTiles(128, 64, 64, 8, 3)


def tiles_of_codes(tiles: MatmulTiles) -> MatmulTiles:
    """Return the tiles of a grouped product over experts whose weights are codes, for those of plain weights.

    A step of a tile has one group of input features. Codes wait in registers, so that a tile has at most 64 rows.
    """
    return MatmulTiles(min(tiles.rows, 64), min(tiles.columns, 64), GROUP, 4, 4)
