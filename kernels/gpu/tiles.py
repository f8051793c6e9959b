"""Tile sizes of the attention kernels, from a table by shape: nothing is tuned while serving.

The numbers aim at an H200: 132 multiprocessors, 228 KB of shared memory each. Decoding streams the cache, so what
counts is bytes in flight: `stages - 1` tiles of keys and of values for each of `per_sm` programs. Prefill is bound by
the tensor cores, so what counts is the number of rows that share a tile of keys. float32 takes three products for one
(tf32x3) and more registers, so its tiles are small. Devices with less shared memory than Hopper (`ROOMY_BYTES`) have
smaller tiles where those for an H200 need more than 99 KB; what has less than that is not served.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiles:
    rows: int  # of the query tile: heads of a group, times tokens for prefill
    keys: int
    warps: int
    stages: int
    per_sm: int = 1  # programs that one multiprocessor holds at once; for the persistent grid of decoding

    @property
    def paged_stages(self) -> int:
        """Of a loop that fetches block ids before the keys that they lead to, as long before as the keys."""
        return 2 * self.stages - 1


MIN_ROWS = 16  # the least that a matrix instruction takes
ROOMY_BYTES = 227 << 10  # of shared memory for one program: compute capability 9.0, 10.0


def power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def dot_precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies this type; 16 bits are always exact. Plain float32 would not use the tensor cores."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def decode_tiles(head_dim: int, group: int, dtype: torch.dtype) -> Tiles:
    """group: query heads per key-value head; a group of more than 64 is cut (of more than 16, where a row is long)."""
    width = power_of_2(head_dim) * dtype.itemsize  # bytes of one key in a tile
    rows = min(64 if width <= 512 else MIN_ROWS, max(MIN_ROWS, power_of_2(group)))
    stages = 3 if rows == MIN_ROWS and dtype.itemsize == 2 else 2
    keys = max(16, min(128 if dtype.itemsize == 2 else 32, 128 * 128 // width))
    return Tiles(rows, keys, 4, stages, 2)


def prefill_tiles(head_dim: int, group: int, dtype: torch.dtype, window: int = 0, roomy: bool = True) -> Tiles:
    """window: of the layer, 0 for none; it takes one more loop, and its registers."""
    width = power_of_2(head_dim) * dtype.itemsize
    if not roomy and width > 256 and group <= 64:
        if dtype.itemsize == 2:
            return Tiles(64, 32, 8, 2)
        rows = max(32 if width <= 512 else MIN_ROWS, power_of_2(group))
        return Tiles(rows, 32 if rows <= 32 and width <= 512 else 16, 4, 2)
    if dtype.itemsize == 4:
        tiles = Tiles(64, 32, 4, 2) if width <= 256 else Tiles(64, 32, 8, 2) if width <= 512 else Tiles(64, 16, 8, 2)
    elif width <= 128:
        tiles = Tiles(128, 128, 8, 3)
    elif width <= 256:
        # Scores, weights and results of 128 keys just fit into the registers of 256 threads; a third stage would not.
        # Per key that is 30 % fewer instructions than with 64, and half of the barriers.
        tiles = Tiles(128, 64, 8, 3) if window else Tiles(128, 128, 8, 2)
    else:
        # With 64 rows two groups of four warps would compute the same scores.
        tiles = Tiles(128, 64, 8, 2)
    if group <= tiles.rows:
        return tiles
    return Tiles(power_of_2(group), tiles.keys, tiles.warps, tiles.stages)


# Keys that the batch-invariant mode sums up apart, whatever runs: few rows with many keys are work for many programs.
INVARIANT_PIECE = 2048


def invariant_tiles(
    head_dim: int, group: int, dtype: torch.dtype, window: int, roomy: bool = True
) -> tuple[Tiles, Tiles]:
    """For rows and for prompts. Their instructions, and what a warp does with them, are the same: a tile for rows has
    the least rows that Hopper's matrix instructions take, which a prompt's tile has once for each four warps."""
    tiles = prefill_tiles(head_dim, group, dtype, window, roomy)
    if dtype.itemsize == 4:
        return tiles, tiles
    if head_dim > 128:  # pieces are added up in registers
        tiles = Tiles(64, 32, 8, 3 if roomy else 2)
        return tiles, tiles
    if head_dim > 64:
        tiles = Tiles(128, 64, 8, 3)
    return Tiles(64, tiles.keys, 4, tiles.stages, 2), tiles


@dataclass(frozen=True)
class ProductTiles:
    """Of the product of the batch-invariant mode."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


PLACES = 100  # tiles that are enough for a device; of fewer, smaller ones are faster


def product_tiles(tokens: int, columns: int, dtype: torch.dtype) -> ProductTiles:
    """For the rows of x and of the weights. A multiprocessor fetches rows + columns values for rows * columns products,
    so large tiles are faster where there are enough of them. Those of a decode step stream the weights: what counts is
    how many bytes are under way on all of the device."""
    if dtype.itemsize == 4:
        return ProductTiles(32, 32, 32, 4, 3)
    if tokens > 64 and -(-tokens // 128) * -(-columns // 128) >= PLACES:
        return ProductTiles(128, 128, 64, 8, 4)
    if tokens > 128:
        return ProductTiles(128, 64, 64, 8, 4)
    return ProductTiles(64, 64, 64, 4, 6) if columns > 2048 else ProductTiles(64, 32, 64, 4, 8)
