"""Tile sizes of the attention kernels, from a table by shape: nothing is tuned while serving.

The numbers aim at an H200: 132 multiprocessors, 228 KB of shared memory each. Decoding streams the cache, so what
counts is bytes in flight: `stages` tiles of keys and of values for each of `per_sm` programs. Prefill is bound by the
tensor cores, so what counts is the number of rows that share a tile of keys.
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


MIN_ROWS = 16  # the least that a matrix instruction takes


def power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def decode_tiles(head_dim: int, group: int, dtype: torch.dtype) -> Tiles:
    """group: query heads per key-value head; a group of more than 64 is cut."""
    rows = min(64, max(MIN_ROWS, power_of_2(group)))
    width = power_of_2(head_dim) * dtype.itemsize  # bytes of one key in a tile
    if width <= 128:
        return Tiles(rows, 128, 4, 3, 2)
    if width <= 256:
        return Tiles(rows, 64, 4, 3, 2)
    if width <= 512:
        return Tiles(rows, 32, 4, 3, 2)
    return Tiles(rows, 16, 4, 3, 2)


def prefill_tiles(head_dim: int, group: int, dtype: torch.dtype) -> Tiles:
    width = power_of_2(head_dim) * dtype.itemsize
    if width <= 128:
        tiles = Tiles(128, 128, 8, 3)
    elif width <= 256:
        tiles = Tiles(128, 64, 8, 3)
    elif width <= 512:
        tiles = Tiles(64, 64, 8, 2)
    else:
        tiles = Tiles(64, 32, 8, 2)
    if group <= tiles.rows:
        return tiles
    return Tiles(power_of_2(group), tiles.keys, tiles.warps, tiles.stages)
